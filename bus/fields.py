"""The declaration of the fields of orders, intents and the policy. Standard library only.

A dataclass declares each field once, with its limits and words. The bodies of the admin API, the command line
and the forms of the dashboard derive from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, TypeVar

MAX_COUNT: Final = 2**31 - 1

FieldType = Literal[
    "integer", "number", "text", "choice", "precision", "layers", "parts", "blocks", "workers", "degree"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The declaration of one field.

    `minimum` and `maximum` limit the value, or each value of a list; `minimum` itself is excluded with
    `above_minimum`. `max_items` limits a list. `choices`: the only values of a field of text, with their
    meanings. `unset`: the word for no value, where there need be none. `is_shown`: the dashboard's form has
    an input for it.
    """

    label: str
    summary: str
    type: FieldType
    name: str = ""
    default: Any = None
    unit: str = ""
    is_required: bool = False
    minimum: float = 0
    maximum: float = MAX_COUNT
    above_minimum: bool = False
    max_items: int = 0
    choices: Mapping[str, str] = field(default_factory=dict)
    unset: str = ""
    is_shown: bool = True

    @property
    def limits(self) -> str:
        """The allowed values, as in `more than 0 and at most 1`."""
        if self.choices:
            return ", ".join(self.choices)
        if self.above_minimum:
            return f"more than {self.minimum} and at most {self.maximum}"
        return f"{self.minimum} to {self.maximum}" if self.maximum != MAX_COUNT else f"{self.minimum} or more"


FieldT = TypeVar("FieldT", bound=Field)


def declared(one: Field) -> Any:
    """Return a field of a dataclass that carries its declaration."""
    metadata = {"declared": one}
    return field(metadata=metadata) if one.is_required else field(default=one.default, metadata=metadata)


def required(label: str, summary: str, kind: FieldType, **declaration: Any) -> Any:
    """Declare a field without a default."""
    return declared(Field(label=label, summary=summary, type=kind, is_required=True, **declaration))


def optional(label: str, summary: str, kind: FieldType, **declaration: Any) -> Any:
    """Declare a field with a default: None unless it is given."""
    return declared(Field(label=label, summary=summary, type=kind, **declaration))


def declared_fields(kind: Any, of: type[FieldT]) -> tuple[FieldT, ...]:
    """Return the declarations of a dataclass in their order; fields without one are left out."""
    found = ((one.name, one.metadata.get("declared")) for one in fields(kind))
    return tuple(replace(one, name=name) for name, one in found if isinstance(one, of))
