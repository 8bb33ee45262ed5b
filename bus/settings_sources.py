"""Layers of settings (section.key -> value and origin) from files and variables; the later layer wins.

Works on any pydantic model whose fields are sections with keys. Every error names origin, key and value.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

PREFIX = "INSTAR_"
CONFIG_VARIABLE = "INSTAR_CONFIG"
DEFAULT_FILE = Path("instar.toml")

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Given:
    """One value and its origin, as errors name it: `instar.toml`, `INSTAR_PORT`, `--port`."""

    value: Any
    origin: str


Layer = dict[str, Given]  # "gateway.port" -> Given(8000, "instar.toml")


class SettingsError(ValueError):
    """A wrong setting. One line a problem: the origin, the key, the value, what would be accepted."""


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return `section.key` -> field, in the order of the file."""
    return {
        f"{section}.{key}": field
        for section, holder in model.model_fields.items()
        for key, field in holder.annotation.model_fields.items()  # type: ignore[union-attr]
    }


def is_secret(field: FieldInfo) -> bool:
    """Return True for passwords and keys (repr=False): no message and no listing shows them."""
    return not field.repr


def config_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: `path`, else INSTAR_CONFIG (empty: none), else instar.toml if present."""
    if path is None and CONFIG_VARIABLE not in environ:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    chosen = path if path is not None else Path(environ[CONFIG_VARIABLE])
    if path is None and not environ[CONFIG_VARIABLE]:
        return None
    if not chosen.is_file():
        asked = "asked for" if path is not None else f"named by {CONFIG_VARIABLE}"
        raise SettingsError(f"{chosen}: {asked}, but there is no such file")
    return chosen


def read_file(path: Path, model: type[BaseModel]) -> Layer:
    """Read a TOML file. Raises SettingsError for broken TOML and for names that the model does not have."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    found: Layer = {}
    for section, keys in data.items():
        if isinstance(keys, dict) and keys:
            found |= {f"{section}.{key}": Given(value, str(path)) for key, value in keys.items()}
        elif not isinstance(keys, dict) or section not in model.model_fields:
            found[section] = Given(keys, str(path))
    known = list(fields_of(model))
    problems = [
        f"{given.origin}: {name} = {given.value!r}: there is no such setting{_suggestion(name, known)}"
        for name, given in found.items()
        if name not in known
    ]
    if problems:
        raise SettingsError("\n".join(problems))
    return found


def _suggestion(name: str, names: list[str]) -> str:
    """Return a hint with the closest name, or with the section of a key that was given alone."""
    same_key = [full for full in names if full.split(".")[-1] == name.split(".")[-1]]
    close = get_close_matches(name, names, n=1, cutoff=0.75) or same_key
    return f"; did you mean {close[0]}?" if close else "; `instar settings --example` lists all"


# Variables that Kubernetes sets in every container for a service called "instar" or "instar-anything":
# INSTAR_PORT=tcp://10.0.0.1:8000, INSTAR_SERVICE_HOST, INSTAR_SERVICE_PORT_HTTP, INSTAR_PORT_8000_TCP_ADDR.
_KUBERNETES_NAME = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
_KUBERNETES_VALUE = re.compile(r"^(tcp|udp|sctp)://")


def read_environment(
    environ: Mapping[str, str], model: type[BaseModel], short_names: Mapping[str, str]
) -> Layer:
    """Read INSTAR_SECTION__KEY and the short names; the long name wins over the short one.

    Raises SettingsError for an unknown name with two underscores, for a likely misspelling (INSTAR_WORKER,
    INSTAR_GATEWAY_PORT) and for a key without its section (INSTAR_API_KEYS, which must not be ignored). Other
    INSTAR_ variables may belong to other programs: compose.yaml has some.
    """
    long_names = {variable_of(name): name for name in fields_of(model)}
    names = {f"{PREFIX}{short}": target for short, target in short_names.items()} | long_names
    found: Layer = {}
    problems: list[str] = []
    for variable in sorted(environ, key=lambda name: name in long_names):
        value = environ[variable]
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if _KUBERNETES_NAME.search(variable) or _KUBERNETES_VALUE.match(value):
            continue
        if variable in names:
            found[names[variable]] = Given(value, variable)
        elif meant := _meant(variable, names):
            problems.append(f"{variable}: there is no such setting; did you mean {meant}?")
        elif "__" in variable.removeprefix(PREFIX):
            problems.append(f"{variable}: there is no such setting; `instar settings` lists all")
    if problems:
        raise SettingsError("\n".join(problems))
    return found


def _meant(variable: str, names: Mapping[str, str]) -> str | None:
    """Return the variable of a close name, or of a key without its section or its plural s."""
    if close := get_close_matches(variable, names, n=1, cutoff=0.9):
        return close[0]
    key = variable.removeprefix(PREFIX).lower()
    same_key = (known for known, name in names.items() if name.split(".")[1] in (key, f"{key}s"))
    return next(same_key, None)


def variable_of(name: str) -> str:
    """Return the variable of a setting: gateway.port -> INSTAR_GATEWAY__PORT."""
    return PREFIX + name.upper().replace(".", "__")


def merge(model: type[Model], layers: Iterable[Layer]) -> Model:
    """Return the model with the last value of every key. Raises SettingsError with each bad value."""
    merged: Layer = {}
    for layer in layers:
        merged |= layer
    sections: dict[str, dict[str, Any]] = {}
    for name, given in merged.items():
        section, key = name.split(".", 1)
        sections.setdefault(section, {})[key] = given.value
    try:
        return model.model_validate(sections)
    except ValidationError as error:
        fields = fields_of(model)
        raise SettingsError("\n".join(_complaint(e, merged, fields) for e in error.errors())) from error


# What pydantic's error types demand; {names} are keys of the error's context.
_WANTED: Final = {
    "greater_than_equal": "{ge} or more",
    "greater_than": "above {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "below {lt}",
    "literal_error": "{expected}",
    **dict.fromkeys(("int_parsing", "int_from_float", "int_type"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    "string_type": "text",
    "list_type": "a list",
}


def _complaint(error: Any, merged: Layer, fields: Mapping[str, FieldInfo]) -> str:
    location = [str(part) for part in error["loc"]]
    name = ".".join(location[:2])
    reason = str(error["msg"]).removeprefix("Value error, ")  # a validator of ours says all
    if wanted := _WANTED.get(error["type"]):
        reason = f"it must be {wanted.format(**error.get('ctx', {}))}"
    if name not in merged:  # a rule between keys: name the ones that were given
        origins = {given.origin for key, given in merged.items() if key.startswith(f"{name}.")}
        return f"{', '.join(sorted(origins)) or 'defaults'}: [{name}]: {reason}"
    given = merged[name]
    value = "(not shown)" if is_secret(fields[name]) else repr(given.value)
    return f"{given.origin}: {name} = {value}: {reason}"
