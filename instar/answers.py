"""What is told of an answer to programs."""

from __future__ import annotations

import json
import sys
from typing import Any


def tell_json(found: Any, is_good: bool = True) -> int:
    """The exit status."""
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return int(not is_good)
