"""`instar pull`: a checkpoint from a hub."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from bus.pulled import DEFAULT_REVISION, find_pulled, read_record, split_name
from instar.errors import InputError, ServerError
from instar.output.progress import progress_line
from instar.output.tables import write_text
from instar.parser import CommandParser
from instar.pull.download import AGAIN, pull
from instar.pull.hub import Hub

DESCRIPTION: Final = """\
Downloads a model from a hub, in safetensors, and prints its folder. `instar serve NAME` finds it. A GGUF file
comes if its name is given; then its path is printed.

  instar pull Qwen/Qwen2.5-0.5B-Instruct
  instar pull Qwen/Qwen2.5-0.5B-Instruct@v1.0     a tag, a branch or a commit
  instar pull Qwen/Qwen2.5-0.5B-Instruct-GGUF qwen2.5-0.5b-instruct-q8_0.gguf
  HF_ENDPOINT=https://mirror instar pull ...      another hub
  HF_TOKEN=hf_... instar pull ...                 a private or gated model
  HF_HUB_OFFLINE=1 instar pull ...                asks no hub: prints the folder if the model is there

An interrupted pull goes on where it stopped. Every file is compared with the digest that the hub names.
"""


def add_to(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME", help="ORG/NAME of the hub, with @REVISION if not its newest")
    parser.add_argument(
        "file", nargs="?", default="", metavar="FILE", help="a GGUF file of it, in place of safetensors"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    repo, revision = split_name(args.name)
    if not repo:
        raise InputError(f"{args.name!r} is not a name of a hub; write it as ORG/NAME or ORG/NAME@REVISION")
    wanted = f"{args.name} {args.file}".strip()
    hub = Hub()
    if hub.is_offline:
        folder = find_pulled(args.name)
        if folder is None or not (folder / args.file).exists():
            raise ServerError(
                f"HF_HUB_OFFLINE is set, and {wanted} has not been pulled; unset it, or copy a model "
                "folder here and name that"
            )
    else:
        with progress_line(AGAIN) as line:
            folder = pull(hub, repo, revision or DEFAULT_REVISION, line, args.file)
    path = folder / args.file  # the folder itself without a file
    if (record := read_record(folder)) is not None:
        served = path if args.file else args.name
        sys.stderr.write(f"{repo} at commit {record.commit}; serve it with `instar serve {served}`\n")
    return write_text(f"{path}\n")
