"""Settings as text: the example file, and the listing of what is in force."""

from __future__ import annotations

import json
import os
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from bus.settings import Settings, layers_of
from bus.settings_sources import fields_of, is_secret, merge, variable_of

HEADER = """\
# Every setting of Instar with its default. Copy to instar.toml and change what you like; what is left out
# keeps its default. INSTAR_<SECTION>__<KEY> in the environment wins over the file: INSTAR_GATEWAY__PORT=8001.
# Written by `instar settings --example`.
"""


def example() -> str:
    """The file `instar.example.toml`: sections, descriptions, limits and defaults."""
    parts = [HEADER]
    for section, holder in Settings.model_fields.items():
        model = typing.cast(Any, holder.annotation)
        about = (model.__doc__ or "").strip().splitlines()
        parts.append(f"\n[{section}]" + (f"  # {about[0]}" if about else "") + "\n")
        for key, field in model.model_fields.items():
            note = ", ".join(filter(None, (field.description, _limits(field))))
            line = f"{key} = {json.dumps(field.get_default(call_default_factory=True))}"
            parts.append(f"{line}  # {note}\n" if note else f"{line}\n")
    return "".join(parts)


def listing(path: Path | None) -> str:
    """One `section.key = value` a line; what is not a default carries its origin."""
    layers = layers_of(path, os.environ)
    settings = merge(Settings, layers)
    lines = []
    for name, field in fields_of(Settings).items():
        section, key = name.split(".")
        value = getattr(getattr(settings, section), key)
        shown = '"(not shown)"' if is_secret(field) and value else json.dumps(value)
        origin = next((layer[name].origin for layer in reversed(layers) if name in layer), None)
        lines.append(f"{name} = {shown}" + (f"  [{origin}]" if origin else ""))
    return (
        "\n".join(lines)
        + f"\n\nset one with a variable such as {variable_of('gateway.port')}, or in instar.toml\n"
    )


def _limits(field: FieldInfo) -> str:
    """`1..64`, `> 0`, `"a" | "b"`: what the value may be, where the type alone does not say."""
    if typing.get_origin(field.annotation) is Literal:
        return " | ".join(json.dumps(choice) for choice in typing.get_args(field.annotation))
    limits = {
        name: value
        for rule in field.metadata
        for name in ("ge", "gt", "le")
        if (value := getattr(rule, name, None)) is not None
    }
    if {"ge", "le"} <= limits.keys():
        return f"{limits['ge']}..{limits['le']}"
    signs = {"ge": ">=", "gt": ">", "le": "<="}
    return ", ".join(f"{signs[name]} {value}" for name, value in limits.items() if (name, value) != ("ge", 0))
