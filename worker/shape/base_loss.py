"""The loss of a variant against its model, from the file that `instar profile --against` writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bus.variants import LOSS_FILE
from worker.model.config import ModelConfig, ModelError
from worker.model.quantized_sets import writing_whole
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest

FORMAT = 1
_REMEDY = "make it again with `instar profile --against`"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseLoss:
    """The perplexities of two checkpoints on the same tokens.

    model, base: digests of the checkpoints. pattern: "2:4" if all matrices of layers are so sparse, else "".
    """

    model: str
    base: str
    calibration: str
    windows: list[int]  # how many, tokens of each
    perplexity: list[float]  # of the base, of the variant
    pattern: str = ""
    format: int = FORMAT

    @property
    def loss(self) -> float:
        """The share of perplexity that the variant adds, at least 0."""
        return max(0.0, self.perplexity[1] / self.perplexity[0] - 1)


def base_loss_path(folder: Path) -> Path:
    return folder / LOSS_FILE


def write_base_loss(folder: Path, found: BaseLoss) -> None:
    """Write the file whole or not at all. Raises OSError."""
    with writing_whole(base_loss_path(folder)) as unfinished:
        unfinished.write_text(json.dumps(asdict(found), indent=1) + "\n")


def read_base_loss(config: ModelConfig, base: ModelConfig) -> BaseLoss:
    """Read what the checkpoint of `config` loses against that of `base`.

    Raises ModelError if it was not measured, or of other checkpoints.
    """
    path = base_loss_path(config.folder)
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
        found = BaseLoss(**said)
    except FileNotFoundError:
        raise ModelError(f"there is no {path}; {_REMEDY}") from None
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: not a readable measurement: {error}; {_REMEDY}") from error
    if found.format != FORMAT or len(found.perplexity) != 2 or min(found.perplexity) <= 0:
        raise ModelError(f"{path}: of format {found.format} with {found.perplexity}, not {FORMAT}; {_REMEDY}")
    for digest, one in ((found.model, config), (found.base, base)):
        if (now := checkpoint_digest(one, open_checkpoint(one))) != digest:
            why = f"measured with another checkpoint ({digest[:12]}) than that in {one.folder} ({now[:12]})"
            raise ModelError(f"{path}: {why}; {_REMEDY}")
    return found
