"""`python -m worker.offline COMMAND MODEL`: `instar quantize` and `instar profile`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from worker.offline.options import COMMANDS, make_parser

FAILED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: of the process) names. Return the exit status."""
    name, *options = sys.argv[1:] if argv is None else argv
    args = make_parser(name).parse_args(options)
    # These import torch, which takes seconds.
    from worker.model.config import ModelError
    from worker.offline import commands

    run = {"quantize": commands.quantize, "profile": commands.profile}[name]
    try:
        run(args)
    except (ModelError, OSError) as problem:
        sys.stderr.write(f"instar {name}: {problem}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"instar {name}: stopped; {COMMANDS[name].after_interrupt}\n")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
