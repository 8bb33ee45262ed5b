"""A sample of every message, and bytes of them read by whatever release runs this.

Only the standard library and `bus`, so that another release can run it, in its own folder:

    python -c "$(cat tests/support/wire_samples.py)" record      prints {type: bytes in base64}
    python -c "$(cat tests/support/wire_samples.py)" read        reads that, prints {type: refusal}
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import sys
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def sample(kind: Any) -> Any:
    """Return a value of this type in which every field and container has something, always the same."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{field.name: sample(hints[field.name]) for field in dataclasses.fields(kind)})
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return sample(next(one for one in arguments if one is not type(None)))
    if origin is list:
        return [sample(arguments[0])]
    if origin in (tuple, frozenset):
        return origin([sample(arguments[0])])
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    return {str: "a", int: 7, float: 0.5, bool: True, bytes: b"b"}[kind]


def _record() -> dict[str, str]:
    from bus.codec import MESSAGE_TYPES, encode

    return {kind.__name__: base64.b64encode(encode(sample(kind))).decode() for kind in MESSAGE_TYPES}


def _read(recorded: dict[str, str]) -> dict[str, str]:
    from bus.codec import DecodeError, decode

    found = {}
    for name, text in recorded.items():
        try:
            decode(base64.b64decode(text))
            found[name] = ""
        except DecodeError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    made = _record() if sys.argv[1] == "record" else _read(json.load(sys.stdin))
    sys.stdout.write(json.dumps(made, indent=1, sort_keys=True) + "\n")
