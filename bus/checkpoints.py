"""A checkpoint's folder as all processes see it: what its config says, and a digest that tells whether it is
still the same. Reads no tensor."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from bus.families import architecture_of

WEIGHTS = "*.safetensors"


class BadCheckpoint(ValueError):
    """This folder is no model; says what it lacks."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`context`: tokens, prompt and output, that a sequence may have; 0: the config does not say."""

    num_layers: int
    digest: str
    context: int = 0


def read_checkpoint(folder: Path) -> Checkpoint:
    """Of a folder in Hugging Face's format. Without weights it may still be served with random ones. Raises
    BadCheckpoint."""
    if not folder.is_dir():
        raise BadCheckpoint(
            f"there is no folder {folder}; models are read from local folders, nothing is downloaded"
        )
    path = folder / "config.json"
    try:
        raw = path.read_bytes()
        config = json.loads(raw)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"no config.json in {folder}; a model is a folder in Hugging Face's format"
        ) from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} holds a {type(config).__name__}, not an object")
    try:
        architecture_of(config)
    except ValueError as error:
        raise BadCheckpoint(f"{path}: {error}") from None
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise BadCheckpoint(f"{path} says num_hidden_layers = {num_layers!r}; it must be 1 or more")
    context = config.get("max_position_embeddings")
    return Checkpoint(
        num_layers=num_layers,
        digest=_digest(folder, raw),
        context=context if isinstance(context, int) and context > 0 else 0,
    )


def folder_digest(folder: Path) -> str:
    """Raises BadCheckpoint."""
    return read_checkpoint(folder).digest


def _digest(folder: Path, config: bytes) -> str:
    """Of the config's bytes and the names, sizes and times of the weights: what else lies in the folder (a
    profile, variants) may come and go."""
    digest = hashlib.sha256(config)
    try:
        for path in sorted(folder.glob(WEIGHTS)):
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    except OSError as error:
        raise BadCheckpoint(f"the weights in {folder} cannot be read: {error}") from None
    return digest.hexdigest()[:32]
