"""The order in which layers are swapped, and its loss, from the file that `instar profile` writes."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from bus.precisions import DEFAULT_SWAP, QUANTIZED, Precision
from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.quantized_sets import FOLDER, find_set, set_path
from worker.model.sources import CheckpointWeights, checkpoint_digest

OrderName = Literal["profile", "front-to-back", "back-to-front", "random"]
ORDERS: tuple[OrderName, ...] = get_args(OrderName)

FORMAT = 1
# What workers swap to by default comes first: one instance has one order for all precisions.
_PREFERRED = (DEFAULT_SWAP, *(name for name in reversed(QUANTIZED) if name != DEFAULT_SWAP))
_REMEDY = "make it again with `instar profile`, or remove it"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProfile:
    """sequence: layers, the first to be swapped first. scores: as `greedy.Scores`. model: fingerprint.
    perplexity: of the calibration text with so many layers of the sequence swapped, none first; empty where
    the profile was made before they were kept."""

    model: str
    precision: str
    method: str
    metric: str
    weights: list[float]
    calibration: str
    windows: list[int]  # how many, tokens of each
    sequence: list[int]
    scores: dict[str, list[float]]
    seconds: float
    perplexity: list[float] = field(default_factory=list)
    format: int = FORMAT

    @property
    def loss(self) -> float | None:
        """Share of perplexity that all layers in this precision bring. None: not known. What is below 0 is
        noise."""
        if len(self.perplexity) != len(self.sequence) + 1:
            return None
        return max(0.0, self.perplexity[-1] / self.perplexity[0] - 1)


def profile_path(folder: Path, precision: str) -> Path:
    return folder / FOLDER / f"profile-{precision}.json"


def find_profile(folder: Path) -> Path | None:
    """The one that a worker follows."""
    paths = (profile_path(folder, precision) for precision in _PREFERRED)
    return next((path for path in paths if path.is_file()), None)


def write_profile(path: Path, profile: OrderProfile) -> None:
    """Whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        unfinished.write_text(json.dumps(asdict(profile), indent=1) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_profile(path: Path, *, model: str, num_layers: int) -> OrderProfile:
    """Raises ModelError: not a profile, damaged, or of another model (`model` is the fingerprint)."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        profile = OrderProfile(**found)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: not a readable profile: {error}; {_REMEDY}") from error
    if profile.format != FORMAT:
        raise ModelError(f"{path}: a profile of format {profile.format}, not {FORMAT}; {_REMEDY}")
    if profile.model != model:
        raise ModelError(
            f"{path}: made for another model ({profile.model[:12]}, and this one is {model[:12]}); {_REMEDY}"
        )
    if sorted(profile.sequence) != list(range(num_layers)):
        raise ModelError(f"{path}: its sequence is not one of this model's {num_layers} layers; {_REMEDY}")
    return profile


def load_order(folder: str | Path, name: str = "") -> tuple[list[int], OrderName]:
    """The order by its name in the settings and the name it really has; "": the profile if there is one,
    else front-to-back, the paper's default without one.

    Raises ModelError: an unknown name, "profile" without a profile, a profile that cannot be used.
    """
    folder = Path(folder)
    if name and name not in ORDERS:
        raise ModelError(f"worker.layer_order = {name!r}: there are {', '.join(ORDERS)}")
    config = read_config(folder)
    path = find_profile(folder)
    if name == "profile" and path is None:
        raise ModelError(
            f'worker.layer_order = "profile", and {folder} has none: make one with `instar profile {folder}`'
        )
    if path is not None and name in ("", "profile"):
        fingerprint = checkpoint_digest(config, CheckpointWeights(folder))
        return read_profile(path, model=fingerprint, num_layers=config.num_layers).sequence, "profile"
    return plain_order(config, name), _plain_name(name)


def plain_order(config: ModelConfig, name: str, seed: int = 0) -> list[int]:
    """front-to-back, back-to-front, or a shuffle that is the same for the same seed."""
    layers = list(range(config.num_layers))
    if name == "back-to-front":
        layers.reverse()
    if name == "random":
        random.Random(seed).shuffle(layers)
    return layers


def _plain_name(name: str) -> OrderName:
    return next((order for order in ORDERS[1:] if order == name), "front-to-back")


log = logging.getLogger("worker")


def losses(config: ModelConfig, precisions: Iterable[Precision], method: str = "") -> dict[Precision, float]:
    """Shares of perplexity more than at full precision, of the calibration text. method: of the worker's
    settings. A precision without a profile of this very model, made with the method that is served, has
    none. Reads a few MB. Raises ModelError: the checkpoint cannot be read."""
    folder, found = config.folder, dict[Precision, float]()
    paths = {
        name: path for name in precisions if name != "full" and (path := profile_path(folder, name)).is_file()
    }
    model = checkpoint_digest(config, CheckpointWeights(folder)) if paths else ""
    for name, path in paths.items():
        try:
            profile = read_profile(path, model=model, num_layers=config.num_layers)
        except ModelError as error:
            log.warning("what %s loses is not known: %s", name, error)
            continue
        if profile.method == _served(folder, name, method) and profile.loss is not None:
            found[name] = profile.loss
    return found


def _served(folder: Path, precision: Precision, method: str) -> str:
    """The method of the set that a worker would load."""
    path = find_set(folder, precision, method)
    methods = [each for each in ("awq", "gptq") if path == set_path(folder, precision, each)]
    return methods[0] if methods else "rtn"
