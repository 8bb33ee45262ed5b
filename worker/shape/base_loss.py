"""The loss of a variant against its model, in the file that `instar profile --against` writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bus.variants import LOSS_FILE
from worker.model.quantized_sets import writing_whole

FORMAT = 1


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
