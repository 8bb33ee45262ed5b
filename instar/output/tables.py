"""Tables without the blanks that rich fills their lines up with: they wrap on a narrower screen, and stand in
every file that an output is kept in."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console

_END: Final = re.compile(r"(?: |\x1b\[[\d;]*m)+$", re.MULTILINE)


@contextmanager
def trimmed(console: Console) -> Iterator[None]:
    """What is printed within goes out at its end, without blanks behind the lines; colours stay."""
    with console.capture() as capture:
        yield
    console.file.write(_END.sub(lambda end: end[0].replace(" ", ""), capture.get()))
    console.file.flush()


def tell_json(found: Any, is_good: bool = True) -> int:
    """Print `found` as JSON. Returns the exit status."""
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return int(not is_good)
