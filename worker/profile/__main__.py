"""`python -m worker.profile MODEL`: what `instar profile` runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from worker.profile.options import TEXT, add_options
from worker.quantize.options import make_parser

FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("profile", TEXT)
    add_options(parser)
    args = parser.parse_args(argv)
    # These bring torch, which takes seconds.
    from worker.model.errors import ModelError
    from worker.profile.command import profile

    try:
        profile(args)
    except (ModelError, OSError) as problem:
        sys.stderr.write(f"instar profile: {problem}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("instar profile: stopped; nothing was written\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
