"""The facts of a checkpoint's folder that all processes need. Reads no tensor."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from bus.families import architecture_of, option_of
from bus.pulled import find_pulled, served_name

WEIGHTS = "*.safetensors"


class BadCheckpoint(ValueError):
    """The folder is not a model. The text says what is missing."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts of one checkpoint. The digest changes with its config and its weights."""

    num_layers: int
    digest: str
    context: int = 0  # most tokens of a sequence, prompt and output; 0: the config does not say


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the facts of a Hugging Face folder, with or without weights. Raises BadCheckpoint."""
    try:
        is_folder = folder.is_dir()
    except OSError as error:  # a name that is too long, or a folder that may not be read
        raise BadCheckpoint(f"{str(folder)[:200]} cannot be opened: {error.strerror}") from None
    if not is_folder and folder.is_file():
        raise BadCheckpoint(
            f"{folder} is a file, not a model folder; `instar convert {folder} DIR` makes one of a GGUF file"
        )
    if not is_folder:
        raise BadCheckpoint(f"there is no folder {folder}; `instar pull ORG/NAME` downloads a model")
    path = folder / "config.json"
    try:
        raw = path.read_bytes()
        config = json.loads(raw)
    except FileNotFoundError:
        raise BadCheckpoint(f"no config.json in {folder}; a model is a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} holds a {type(config).__name__}, not an object")
    try:
        architecture_of(config)
    except ValueError as error:
        raise BadCheckpoint(f"{path}: {error}") from None
    num_layers, context = option_of(config, "num_layers"), option_of(config, "context")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise BadCheckpoint(f"{path} says num_hidden_layers = {num_layers!r}; it must be 1 or more")
    return Checkpoint(num_layers, _digest(folder, raw), max(0, context) if isinstance(context, int) else 0)


def folder_digest(folder: Path) -> str:
    """Return the digest of a checkpoint's folder. Raises BadCheckpoint."""
    return read_checkpoint(folder).digest


def _digest(folder: Path, config: bytes) -> str:
    """Digest the config's bytes and the names, sizes and times of the weights, no other file."""
    digest = hashlib.sha256(config)
    try:
        for path in sorted(folder.glob(WEIGHTS)):
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    except OSError as error:
        raise BadCheckpoint(f"the weights in {folder} cannot be read: {error}") from None
    return digest.hexdigest()[:32]


def parse_model(entry: str) -> tuple[str, Path]:
    """Return (served name, folder) of `name=dir` or `dir` (then the folder's name).

    `dir` may be the name of a checkpoint that `instar pull` fetched. A folder of that name goes first.
    """
    name, is_named, folder = entry.partition("=")
    if not is_named or "/" in name:  # the = belongs to the folder
        name, folder = "", entry
    path = Path(folder).expanduser().resolve()
    if (pulled := find_pulled(folder)) is not None and not path.is_dir():
        return name or served_name(folder), pulled
    return name or path.name, path
