"""The comparison of a checkpoint with the model that it may stand for. Reads no tensor.

A variant of a model is a smaller or sparser checkpoint that answers for it: of the same tokenizer and chat
template, and with room for the same requests. What it loses is measured (`instar profile --against`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bus.checkpoints import BadCheckpoint, Checkpoint, read_checkpoint
from bus.families import option_of

LOSS_FILE: Final = "instar/profile-against.json"  # of `instar profile --against`, in a variant's folder
TWO_OF_FOUR: Final = "2:4"  # of four weights in a row at most two are not zero

_TEMPLATES: Final = "tokenizer_config.json"
# The sizes that structured pruning makes smaller, by their names in `bus.families.OPTIONS`.
_SIZES: Final = ("num_layers", "intermediate_size", "num_heads", "num_kv_heads")


@dataclass(frozen=True, slots=True)
class Likeness:
    """One checkpoint beside the model that it is to stand for.

    `unlike`: why it cannot; "": it can. `pruning`: what of it is smaller, or sparse; "": nothing.
    """

    unlike: str
    pruning: str


def compare(folder: Path, base: Path) -> Likeness:
    """Compare the checkpoint in `folder` with that of its model in `base`. Raises BadCheckpoint."""
    facts, of_base = read_checkpoint(folder), read_checkpoint(base)
    config, base_config = _json(folder / "config.json"), _json(base / "config.json")
    unlike = next(_differences(folder, base, facts, of_base), "")
    return Likeness(unlike, ", ".join(_pruned(folder, config, base_config)))


def sparsity_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a config.json says of zeros in the weights (compressed-tensors), or None.

    Versions of the tools have written it in three places.
    """
    for holder in (config.get("quantization_config"), config.get("compression_config"), config):
        said = holder.get("sparsity_config") if isinstance(holder, Mapping) else None
        if isinstance(said, Mapping):
            return said
    return None


def _differences(folder: Path, base: Path, facts: Checkpoint, of_base: Checkpoint) -> Iterator[str]:
    for file, name in (
        *(("config.json", one) for one in ("vocab_size", "bos_token_id", "eos_token_id")),
        ("generation_config.json", "eos_token_id"),
    ):
        one, other = _json(folder / file).get(name), _json(base / file).get(name)
        if one != other:
            yield f"{name} in {file} is {one!r}, and {other!r} in {base}"
    for file in ("tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        if _content(folder / file) != _content(base / file):
            yield f"{file} is not that of {base}"
    if _json(folder / _TEMPLATES).get("chat_template") != _json(base / _TEMPLATES).get("chat_template"):
        yield f"the chat_template in {_TEMPLATES} is not that of {base}"
    if facts.context and (not of_base.context or facts.context < of_base.context):
        longer = of_base.context or "no limit"
        yield f"its context has {facts.context} tokens, and that of {base} has {longer}"


def _pruned(folder: Path, config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    sizes = {name: (option_of(config, name), option_of(base, name)) for name in _SIZES}
    sizes["hidden_size"] = (config.get("hidden_size"), base.get("hidden_size"))
    for name, (one, other) in sizes.items():
        if isinstance(one, int) and isinstance(other, int) and one < other:
            yield f"{name} {one} of {other}"
    said = sparsity_of(config) or {}
    if structure := said.get("sparsity_structure") or _json(folder / LOSS_FILE).get("pattern"):
        yield f"{structure} sparse"


def _json(path: Path) -> dict[str, Any]:
    """Return an object of JSON; empty without the file. Raises BadCheckpoint."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _content(path: Path) -> object:
    """Return what a file says, however it is laid out; None without the file. Raises BadCheckpoint."""
    if path.suffix == ".json":
        return _json(path) or None
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from None
