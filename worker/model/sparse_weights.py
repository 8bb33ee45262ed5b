"""Checkpoints whose matrices are 2:4 sparse and lie without their zeros, as compressed-tensors writes them.

===========  ======================  ===========================================================
tensor       dtype and shape         meaning
===========  ======================  ===========================================================
compressed   as the model [N, K/2]   the weights that count, row by row
bitmask      uint8 [N, ceil(K / 8)]  which of a row's weights these are, the lowest bit first
shape        int64 [2, 1]            N and K
===========  ======================  ===========================================================

They are put back in their places when they are loaded, and served as any other weights. A CPU would gain
nothing from products without the zeros that int8 does not give with less loss (bench/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from worker.model.config import ModelError
from worker.model.layout import CheckpointTensor
from worker.model.sources import FLOATS, CheckpointWeights

_WEIGHT, _ENDINGS = ".weight", (".compressed", ".bitmask", ".shape")


class SparseCheckpoint(CheckpointWeights):
    """A checkpoint some of whose matrices lie without their zeros. Raises as its base does."""

    def check(self, sources: Iterable[CheckpointTensor]) -> None:
        plain = []
        for source in sources:
            if len(source.shape) != 2 or not self._is_packed(source.tensor):
                plain.append(source)  # only matrices are packed
                continue
            name, (outputs, inputs) = source.tensor.removesuffix(_WEIGHT), source.shape
            self.check_stored(f"{name}.compressed", (outputs, inputs // 2), FLOATS)
            self.check_stored(f"{name}.bitmask", (outputs, -(-inputs // 8)), ("U8",))
        super().check(plain)

    def _is_packed(self, tensor: str) -> bool:
        return not self.has(tensor) and self.has(f"{tensor.removesuffix(_WEIGHT)}.compressed")

    def _unknown_tensors(self, wanted: set[str]) -> list[str]:
        return [tensor for tensor in super()._unknown_tensors(wanted) if not tensor.endswith(_ENDINGS)]

    def stored(self, source: CheckpointTensor) -> Iterator[tuple[str, int]]:
        if not self._is_packed(source.tensor):
            yield from super().stored(source)
            return
        name = source.tensor.removesuffix(_WEIGHT)
        yield from ((f"{name}.{part}", source.shape[0]) for part in ("compressed", "bitmask"))

    @contextmanager
    def opened(self, tensor: str, pause: Callable[[], object] = lambda: None) -> Iterator[Any]:
        """Yield a tensor to take rows of, with its zeros. Raises ModelError."""
        if not self._is_packed(tensor):
            with super().opened(tensor, pause) as stored:
                yield stored
            return
        name = tensor.removesuffix(_WEIGHT)
        with (
            super().opened(f"{name}.compressed", pause) as values,
            super().opened(f"{name}.bitmask", pause) as masks,
        ):
            yield _Rows(f"{self.folder}: {name}", values, masks)


class _Rows:
    """The rows [N, K] of one matrix, read and filled with zeros where they are asked for."""

    def __init__(self, name: str, values: Any, masks: Any) -> None:
        self._name, self._values, self._masks = name, values, masks

    def __getitem__(self, where: slice | tuple[slice, ...]) -> torch.Tensor:
        """Return some rows, or some columns of them: those of a rank."""
        rows, *columns = where if isinstance(where, tuple) else (where,)
        try:
            return unpack(self._values[rows], self._masks[rows])[:, columns[0] if columns else slice(None)]
        except ValueError as error:
            raise ModelError(f"{self._name}: {error}; the file is damaged") from error


def unpack(values: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return [N, K] of the values [N, K / 2] that count and bitmasks uint8 [N, ceil(K / 8)].

    Raises ValueError for a mask of more or fewer weights than there are.
    """
    inputs = 2 * values.shape[1]
    bits = (masks[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    is_kept = bits.flatten(1)[:, :inputs].bool()
    if not torch.equal(is_kept.sum(1), torch.full((len(values),), values.shape[1])):
        raise ValueError(f"its bitmask does not mark {values.shape[1]} weights in each row")
    found = torch.zeros(len(values), inputs, dtype=values.dtype)
    found[is_kept] = values.flatten()
    return found


def has_pattern(weight: torch.Tensor) -> bool:
    """Return True if matrices [..., K] are 2:4 sparse: of four weights in a row at most two are not zero."""
    if weight.shape[-1] % 4:
        return False
    return bool((weight.unflatten(-1, (-1, 4)).count_nonzero(-1) <= 2).all())
