"""The loss of a KV cache in 8 bits, from the file that `instar profile` writes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from worker.model.config import ModelConfig, ModelError
from worker.model.quantized_sets import FOLDER, writing_whole
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest
from worker.shape.layer_order import LEAST_LOSS

FORMAT = 1
_REMEDY = "make it again with `instar profile`, or remove it"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVProfile:
    """The change of a model's outputs by keys and values in 8 bits.

    perplexity: of the calibration text with the KV cache in full precision, and in 8 bits. divergence: of the
    logits from those in full precision, the mean in nats per token.
    """

    model: str
    calibration: str
    windows: list[int]  # how many, tokens of each
    perplexity: list[float]
    divergence: float
    format: int = FORMAT

    @property
    def loss(self) -> float:
        """The share of perplexity that it adds.

        The perplexity of a short text is noisy and may come out too low, so the loss is taken as at least
        LEAST_LOSS of what the divergence stands for, as that of layers.
        """
        full, rounded = self.perplexity
        return max(0.0, rounded / full - 1, LEAST_LOSS * math.expm1(self.divergence))


def kv_profile_path(folder: Path) -> Path:
    return folder / FOLDER / "profile-kv-int8.json"


def write_kv_profile(path: Path, profile: KVProfile) -> None:
    """Write a profile whole or not at all. Raises OSError."""
    with writing_whole(path) as unfinished:
        unfinished.write_text(json.dumps(asdict(profile), indent=1) + "\n")


def read_kv_profile(path: Path, *, model: str) -> KVProfile:
    """Read a profile of the checkpoint with digest `model`. Raises ModelError if it cannot be used."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        profile = KVProfile(**found)
        numbers = [*profile.perplexity, profile.divergence, profile.loss]
    except (OSError, ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"{path}: not a readable profile: {error}; {_REMEDY}") from error
    if profile.format != FORMAT:
        raise ModelError(f"{path}: a profile of format {profile.format}, not {FORMAT}; {_REMEDY}")
    if profile.model != model:
        raise ModelError(
            f"{path}: made for another model ({profile.model[:12]}, and this one is {model[:12]}); {_REMEDY}"
        )
    if not all(map(math.isfinite, numbers)):
        raise ModelError(f"{path}: its perplexities are {profile.perplexity}, not numbers; {_REMEDY}")
    return profile


def kv_loss_or_why(config: ModelConfig) -> tuple[float | None, str]:
    """Return the share of perplexity that a KV cache in 8 bits costs, or None and why it is unknown."""
    path = kv_profile_path(config.folder)
    if not path.is_file():
        return None, f"there is no profile; make one with `instar profile {config.folder}`"
    try:
        return read_kv_profile(path, model=checkpoint_digest(config, open_checkpoint(config))).loss, ""
    except ModelError as error:
        return None, str(error)
