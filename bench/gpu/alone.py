"""A part of `bench.gpu` by itself, from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


def run_alone(
    about: str | None,
    measure: Callable[[torch.device, bool], dict[str, Any]],
    lines: Callable[[dict[str, Any]], Iterator[str]],
) -> int:
    """The exit status. measure: on this device, which is a GPU or not."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write("no CUDA device here: nothing was run\n")
        return 0
    is_gpu = args.device == "cuda"
    found = measure(torch.device("cuda", 0) if is_gpu else torch.device("cpu"), is_gpu)
    problems = found.get("problems", [])
    for line in (*lines(found), *(f"FAILED {problem}" for problem in problems), json.dumps(found)):
        sys.stdout.write(line + "\n")
    return 1 if problems else 0
