"""Instar beside llama.cpp's server and transformers on this machine's processor, in float32.

    python -m bench.peers [--llama-server PATH] [--models 30M,110M] [--rounds 3] [--quick]

`make bench-peers LLAMA_SERVER=PATH` does the same.

Three workloads, with prompts as token ids and outputs of exact lengths:

    at once      64 requests of 64 to 512 tokens in and 128 out; output tokens per second
    one by one   requests of 128 tokens in and 128 out; time per token and to the first one
    open loop    2 requests per second at random for a minute, of 64 to 256 tokens in and 64 out

A contender is started for each measurement, warmed up, measured, and ended; only one runs at a time. In each
round all contenders take turns in each workload, and who is first changes. transformers runs `generate` in a
process: one batch of all requests at once, and one request after the other.

llama-server reads the same weights from a GGUF file. Its KV cache is its default, float16. Without
--llama-server, Instar and transformers are compared alone.

Writes bench/results/peers.json and the table in README.md. A row is marked when other programs took more
than 0.15 cores while it was measured: the machine should be otherwise idle. The model of 110M needs 8 GB of
memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench.common.dummy_model import CONFIGS, model_folder
from bench.common.machine import describe_machine
from bench.common.results import conclude, parser, say
from bench.common.service import OtherPrograms
from bench.peers.contenders import Contender, contenders, version_of
from bench.peers.gguf_file import write_gguf
from bench.peers.report import PAGE, Row, check_page, page_table, report, rewritten, rows_as_json, say_card
from bench.peers.workloads import QUICK, WORKLOADS, PeerLoad

MODELS: Final = "30M,110M"
QUICK_MODELS: Final = "4M"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server program")
    options.add_argument("--models", help=f"sizes of dummies, with commas [{MODELS}]")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--quick", action="store_true", help="one round of a tiny load and model; nothing is written"
    )
    args = options.parse_args()
    try:
        sizes = sizes_in(args.models or (QUICK_MODELS if args.quick else MODELS))
        version = check(args)
    except ValueError as problem:
        options.error(str(problem))
    began = time.perf_counter()
    machine = describe_machine()
    say(f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb_s']} GB/s in a plain sum")
    there = contenders(args.llama_server)
    with folders(sizes, with_gguf=args.llama_server is not None) as models:
        rounds = 1 if args.quick else args.rounds
        rows = list(play(there, models, rounds, QUICK if args.quick else PeerLoad()))
    result = {"bench": "peers", **report(rows, machine, version)}
    result["seconds"] = round(time.perf_counter() - began)
    say_card(result)
    if not args.quick:
        PAGE.write_text(rewritten(PAGE.read_text(), page_table(result)))
        say(f"wrote {PAGE}")
    return conclude(result, is_kept=not args.quick, rows=rows_as_json(rows))


def sizes_in(text: str) -> list[str]:
    """Return the sizes of a list with commas. Raises ValueError for one that there is not."""
    sizes = [size.strip() for size in text.split(",")]
    for size in sizes:
        if size not in CONFIGS:
            known = ", ".join(name for name in CONFIGS if "," not in name)
            raise ValueError(f"--models names {size!r}; there are: {known}")
    return list(dict.fromkeys(sizes))


def check(args: argparse.Namespace) -> str:
    """Return llama-server's version, "" without it. Raises ValueError that says what to do."""
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; at least 1 is needed")
    if not args.quick:
        check_page()
    if args.llama_server is None:
        return ""
    args.llama_server = args.llama_server.expanduser().absolute()
    try:
        return version_of(args.llama_server)
    except ValueError as problem:
        raise ValueError(f"--llama-server: {problem}") from None


@contextmanager
def folders(sizes: Sequence[str], *, with_gguf: bool) -> Iterator[dict[str, Path]]:
    """Make model folders by size, each with its weights in a GGUF file too if wanted."""
    with ExitStack() as stack:
        models = {size: stack.enter_context(model_folder(size)) for size in sizes}
        if with_gguf:
            for folder in models.values():
                write_gguf(folder)
        yield models


def play(
    there: Sequence[Contender], models: Mapping[str, Path], rounds: int, load: PeerLoad
) -> Iterator[Row]:
    """Measure everything once in each round, and print each row."""
    for number in range(rounds):
        for size, folder in models.items():
            for workload in WORKLOADS:
                for contender in turned(there, number):
                    if workload in contender.workloads:
                        row = measure(contender, size, folder, workload, number, load)
                        say(str(row))
                        yield row


def turned(there: Sequence[Contender], number: int) -> list[Contender]:
    """Return the contenders in the order of a round: each is first in turn."""
    first = number % len(there)
    return [*there[first:], *there[:first]]


def measure(contender: Contender, size: str, folder: Path, workload: str, number: int, load: PeerLoad) -> Row:
    with contender.start(folder, load) as running:
        others = OtherPrograms(running)
        measured = running.measure(workload)
        foreign_cores = others.cores()
    return Row(size, contender.name, workload, number, measured.values, foreign_cores, measured.text)
