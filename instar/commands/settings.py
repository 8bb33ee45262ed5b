"""`instar settings`: every setting with its source, and the example file."""

from __future__ import annotations

import argparse
import json
import os
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from bus.settings import Settings, layers_of
from bus.settings_sources import fields_of, is_secret, merge, variable_of
from instar.client import settings_of
from instar.output.tables import write_text
from instar.parser import CommandParser

DESCRIPTION = """\
Shows every setting: its value, and in brackets the file or variable that set it.

  instar settings                              what a service started here would use
  instar settings --example > instar.toml      a file with every default and its meaning, to edit
"""

HEADER = """\
# Every setting of Instar with its default. Copy to instar.toml and change what you like; what is left out
# keeps its default. INSTAR_<SECTION>__<KEY> in the environment wins over the file: INSTAR_GATEWAY__PORT=8001.
# Written by `instar settings --example`.
"""


def add_to(parser: CommandParser) -> None:
    parser.add_argument("--example", action="store_true", help="print a settings file with every default")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.example:
        return write_text(example())
    settings_of(args)  # refuses bad settings
    return write_text(listing(args.config))


def example() -> str:
    """Return the file `instar.example.toml`: sections, descriptions, limits and defaults."""
    parts = [HEADER]
    for section, holder in Settings.model_fields.items():
        model = typing.cast(Any, holder.annotation)
        about = (model.__doc__ or "").strip().splitlines()
        parts.append(f"\n[{section}]" + (f"  # {about[0]}" if about else "") + "\n")
        for key, field in model.model_fields.items():
            note = ", ".join(filter(None, (field.description, limits_of(field))))
            line = f"{key} = {json.dumps(field.get_default(call_default_factory=True))}"
            parts.append(f"{line}  # {note}\n" if note else f"{line}\n")
    return "".join(parts)


def listing(path: Path | None) -> str:
    """Return one `section.key = value` a line, with the source of what is not a default."""
    layers = layers_of(path, os.environ)
    settings = merge(Settings, layers)
    lines = []
    for name, field in fields_of(Settings).items():
        section, key = name.split(".")
        value = getattr(getattr(settings, section), key)
        shown = '"(not shown)"' if is_secret(field) and value else json.dumps(value)
        origin = next((layer[name].origin for layer in reversed(layers) if name in layer), None)
        lines.append(f"{name} = {shown}" + (f"  [{origin}]" if origin else ""))
    lines.append(f"\nset one with a variable such as {variable_of('gateway.port')}, or in instar.toml\n")
    return "\n".join(lines)


def limits_of(field: FieldInfo) -> str:
    """Return the allowed values where the type alone does not say: `1..64`, `> 0`, `"a" | "b"`."""
    if typing.get_origin(field.annotation) is Literal:
        return " | ".join(json.dumps(choice) for choice in typing.get_args(field.annotation))
    signs = {"ge": ">=", "gt": ">", "le": "<="}
    limits = {name: getattr(rule, name) for rule in field.metadata for name in signs if hasattr(rule, name)}
    if {"ge", "le"} <= limits.keys():
        return f"{limits['ge']}..{limits['le']}"
    return ", ".join(f"{signs[name]} {value}" for name, value in limits.items() if (name, value) != ("ge", 0))
