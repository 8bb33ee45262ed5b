"""`python -m worker.quantize MODEL`: what `instar quantize` runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from worker.quantize.options import TEXT, add_options, make_parser

FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("quantize", TEXT)
    add_options(parser)
    args = parser.parse_args(argv)
    # These bring torch, which takes seconds.
    from worker.model.errors import ModelError
    from worker.quantize.command import quantize

    try:
        quantize(args)
    except (ModelError, OSError) as problem:
        sys.stderr.write(f"instar quantize: {problem}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("instar quantize: stopped; the same command goes on from here\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
