"""The order in which layers are swapped, and its loss, from the file that `instar profile` writes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from bus.messages import PARTS
from bus.precisions import DEFAULT_SWAP, QUANTIZED, Precision
from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.quantized_sets import FOLDER, find_set, set_path, writing_whole
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest

OrderName = Literal["profile", "front-to-back", "back-to-front", "random"]
ORDERS: tuple[OrderName, ...] = get_args(OrderName)

FORMAT = 1
LEAST_LOSS = 0.1  # share of the sum of the divergences of all halves
# What workers swap to by default comes first: one instance has one order for all precisions.
_PREFERRED = (DEFAULT_SWAP, *(name for name in reversed(QUANTIZED) if name != DEFAULT_SWAP))
_REMEDY = "make it again with `instar profile`, or remove it"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProfile:
    """A measured order of layers.

    scores: as `worker.offline.importance.Scores`. perplexity: of the calibration text with 0, 1, ... layers
    of the sequence swapped. halves: by part, what each layer's half alone changes, as the mean divergence of
    the logits from those of the full model in nats per token. Both are empty in older files.
    """

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
    halves: dict[str, list[float]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def loss(self) -> float | None:
        """The share of perplexity that all layers in this precision add, at least 0; None if unknown."""
        if len(self.perplexity) != len(self.sequence) + 1:
            return None
        return max(0.0, self.perplexity[-1] / self.perplexity[0] - 1)

    @property
    def half_losses(self) -> dict[str, list[float]]:
        """The share of perplexity that each half alone adds, by part; empty if unknown.

        The halves share the loss of all of them by their divergence, or evenly if that was not measured. The
        perplexity of a short text is noisy and may come out too low, so the loss is taken as at least
        LEAST_LOSS of what the divergences add to.
        """
        if self.loss is None:
            return {}
        total = sum(map(sum, self.halves.values()))
        if not total:
            num_layers = len(self.sequence)
            return dict.fromkeys(PARTS, [self.loss / (num_layers * len(PARTS))] * num_layers)
        share = max(self.loss, LEAST_LOSS * math.expm1(total)) / total
        return {part: [share * nats for nats in of_part] for part, of_part in self.halves.items()}


def profile_path(folder: Path, precision: str) -> Path:
    return folder / FOLDER / f"profile-{precision}.json"


def write_profile(path: Path, profile: OrderProfile) -> None:
    """Write a profile whole or not at all. Raises OSError."""
    with writing_whole(path) as unfinished:
        unfinished.write_text(json.dumps(asdict(profile), indent=1) + "\n")


def read_profile(path: Path, *, model: str, num_layers: int) -> OrderProfile:
    """Read a profile of the checkpoint with digest `model`. Raises ModelError if it cannot be used."""
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
    if path.name != profile_path(path, profile.precision).name:
        raise ModelError(f"{path}: a profile of {profile.precision}, by another name; {_REMEDY}")
    if any(len(of_part) != num_layers for of_part in profile.halves.values()):
        raise ModelError(f"{path}: its halves are not those of {num_layers} layers; {_REMEDY}")
    if sorted(profile.sequence) != list(range(num_layers)):
        raise ModelError(f"{path}: its sequence is not one of this model's {num_layers} layers; {_REMEDY}")
    return profile


def load_order(folder: str | Path, name: str = "") -> tuple[list[int], OrderName]:
    """Return the order that the setting `name` asks for, and the name of that order.

    "": the profile if there is one, else front-to-back, as in the paper. Raises ModelError.
    """
    folder = Path(folder)
    if name and name not in ORDERS:
        raise ModelError(f"worker.layer_order = {name!r}: use one of {', '.join(ORDERS)}")
    config = read_config(folder)
    path = next((path for each in _PREFERRED if (path := profile_path(folder, each)).is_file()), None)
    if name == "profile" and path is None:
        raise ModelError(
            f'worker.layer_order = "profile", and {folder} has none: make one with `instar profile {folder}`'
        )
    if path is not None and name in ("", "profile"):
        digest = checkpoint_digest(config, open_checkpoint(config))
        return read_profile(path, model=digest, num_layers=config.num_layers).sequence, "profile"
    plain = next((order for order in ORDERS[1:] if order == name), ORDERS[1])
    return plain_order(config, plain), plain


def plain_order(config: ModelConfig, name: str, seed: int = 0) -> list[int]:
    """Return front-to-back, back-to-front, or a shuffle that is the same for the same seed."""
    layers = list(range(config.num_layers))
    if name == "back-to-front":
        layers.reverse()
    if name == "random":
        random.Random(seed).shuffle(layers)
    return layers


def losses(config: ModelConfig, precisions: Iterable[Precision], method: str = "") -> dict[Precision, float]:
    """Return the share of perplexity that each precision costs, as profiles beside the model say.

    Without those of another checkpoint, precision or method. Raises ModelError if the checkpoint cannot be
    read.
    """
    found, _ = _profiles(config, precisions, method)
    return {name: profile.loss for name, profile in found.items() if profile.loss is not None}


def half_losses(
    config: ModelConfig, precisions: Iterable[Precision], method: str = ""
) -> dict[Precision, dict[str, list[float]]]:
    """Return by precision and part the share of perplexity that each layer's half costs, as `losses`."""
    return half_losses_or_why(config, precisions, method)[0]


def half_losses_or_why(
    config: ModelConfig, precisions: Iterable[Precision], method: str
) -> tuple[dict[Precision, dict[str, list[float]]], dict[Precision, str]]:
    """Return `half_losses`, and by precision why there are none."""
    found, unknown = _profiles(config, precisions, method)
    for name, profile in found.items():
        if not profile.half_losses:
            unknown[name] = f"{profile_path(config.folder, name)}: has no perplexities; {_REMEDY}"
    return {name: profile.half_losses for name, profile in found.items() if profile.half_losses}, unknown


def _profiles(
    config: ModelConfig, precisions: Iterable[Precision], method: str
) -> tuple[dict[Precision, OrderProfile], dict[Precision, str]]:
    """Return the profiles that can be used, and why the others cannot."""
    folder, found, unknown = config.folder, dict[Precision, OrderProfile](), dict[Precision, str]()
    model = ""
    for name in (one for one in precisions if one != "full"):
        path = profile_path(folder, name)
        if not path.is_file():
            unknown[name] = f"there is no profile; make one with `instar profile {folder} --precision {name}`"
            continue
        model = model or checkpoint_digest(config, open_checkpoint(config))
        try:
            profile = read_profile(path, model=model, num_layers=config.num_layers)
        except ModelError as error:
            unknown[name] = str(error)
            continue
        if profile.method != (served := _served(folder, name, method)):
            unknown[name] = f"{path}: measured with {profile.method}, and {served} is served; {_REMEDY}"
            continue
        found[name] = profile
    return found, unknown


def _served(folder: Path, precision: Precision, method: str) -> str:
    """Return the method of the set that a worker would load."""
    path = find_set(folder, precision, method)
    methods = [each for each in ("awq", "gptq") if path == set_path(folder, precision, each)]
    return methods[0] if methods else "rtn"
