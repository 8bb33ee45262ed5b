"""Checks of a variant in its pages: sums of its bytes, and its outputs for a fixed input.

Sums find every changed bit. Outputs find wrong kernels and pages that hold something else, but not a single
changed bit, since each output is a sum of thousands of products.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

import kernels
from worker.memory import VirtualRange
from worker.memory.backend import Finish, finished
from worker.model.layer import LayerHalf
from worker.model.linear import Linear, QuantizedLinear, outputs_of

ROW_BYTES = 4096


def num_rows(nbytes: int) -> int:
    """Return the number of rows of `ROW_BYTES` that hold `nbytes`."""
    return -(-nbytes // ROW_BYTES)


def row_sums(data: torch.Tensor) -> torch.Tensor:
    """Return int64 [rows] on the host: the sum of each row of uint8 [n], which may lie anywhere.

    A row is 4096 bytes, read as words of eight and added modulo 2^64; the last one is padded with zeros.
    """
    sums = RowSums(data)
    sums.take(0, len(data))
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
    return sums.found


class RowSums:
    """The sums of uint8 [n], taken piece by piece: quicker (27 GB/s) while the bytes are in caches.

    found: the sums, int64 [rows] on the host. Those of a GPU are there once the work has ended that was
    launched on it in the stream in which they were taken.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self.found = torch.zeros(num_rows(len(data)), dtype=torch.int64, pin_memory=data.is_cuda)
        self._data = data
        whole = data[: len(data) // ROW_BYTES * ROW_BYTES].view(torch.int64).view(-1, ROW_BYTES // 8)
        self._whole = whole.numpy() if data.device.type == "cpu" else whole
        self._rows = self.found.numpy()

    def take(self, first: int, end: int) -> None:
        """Take the sums of bytes first <= i < end. `first` begins a row; `end` ends one, or the data."""
        rows = slice(first // ROW_BYTES, end // ROW_BYTES)
        if isinstance(self._whole, np.ndarray):
            np.sum(self._whole[rows], axis=1, out=self._rows[rows])
        else:
            self.found[rows].copy_(self._whole[rows].sum(1), non_blocking=True)
        if end % ROW_BYTES:
            rest = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=self._data.device)
            rest[: end % ROW_BYTES] = self._data[rows.stop * ROW_BYTES : end]
            self.found[rows.stop].copy_(rest.view(torch.int64).sum(), non_blocking=True)


_TOKENS = 4
_REFERENCE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}

# Largest error of one output, and of all together, in units of the outputs' root mean square. Sums are added
# in other orders, and outputs are rounded to the dtype: a bfloat16 of 4 deviations is off by up to 0.008 of
# one. A page of 64 KiB that was not copied is 0.05 of one product in a 7B model's FFN.
_LIMITS = {torch.float32: (1e-3, 1e-4), torch.float16: (2e-2, 2e-3), torch.bfloat16: (8e-2, 8e-3)}


class WrongVariant(RuntimeError):
    """The pages of a variant do not hold what they should."""


def probe(half: LayerHalf, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what each linear map of the half makes of a fixed input: float32 [4, N] each."""
    return [product(_input(product.num_inputs, dtype, product.device)).float() for product in half.linears]


def expected_outputs(half: LayerHalf, dtype: torch.dtype) -> torch.Tensor:
    """Return the outputs of `probe` by the plain reference: float32 [num_outputs], flat."""
    inputs = (_input(product.num_inputs, dtype, product.device) for product in half.linears)
    made = [_reference(product, x) for product, x in zip(half.linears, inputs, strict=True)]
    return torch.cat([each.float().flatten() for each in made])


def _reference(product: Linear, x: torch.Tensor) -> torch.Tensor:
    """Run some outputs of every unit at a time: a whole matrix in float32 would leave the caches.

    On a GPU, where each part is 17 launches, they are more.
    """
    with kernels.use_backend("reference"):
        if not isinstance(product, QuantizedLinear):
            return product(x)
        x, weight, made = product.arranged(x), product.weight, []
        at_once = _REFERENCE_ELEMENTS[product.device.type]
        rows = max(1, at_once // (weight.num_units * weight.unit_inputs))
        for first in range(0, weight.unit_outputs, rows):
            part = outputs_of(weight, slice(first, first + rows))
            made.append(kernels.quantized_linear(x, part).unflatten(1, (-1, part.unit_outputs)))
        out = torch.cat(made, 2).flatten(1)
        return out if product.bias is None else out + product.bias


def num_outputs(half: LayerHalf) -> int:
    """Return the number of floats in all outputs of `probe`."""
    return sum(_TOKENS * product.num_outputs for product in half.linears)


def check_outputs(what: str, half: LayerHalf, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare the outputs of `probe` with `expected`, float32 [num_outputs]. Raises WrongVariant."""
    first = 0
    for i, got in enumerate(probe(half, dtype)):
        # Squares of a damaged float32 would overflow to infinity, against which no error counts.
        wanted = expected[first : first + got.numel()].view(got.shape).to(got.device, torch.float64)
        first += got.numel()
        unit = wanted.square().mean().sqrt().clamp(min=1e-30)
        wrong = (got - wanted) / unit
        worst, overall = float(wrong.abs().max()), float(wrong.square().mean().sqrt())
        most, most_overall = _LIMITS[dtype]
        if not (worst <= most and overall <= most_overall):  # NaN is wrong, too
            raise WrongVariant(
                f"{what}: product {i + 1} of {len(half.linears)} is off by {worst:.2g} at worst and"
                f" {overall:.2g} overall (rounding explains {most:g} and {most_overall:g})"
            )


@lru_cache(maxsize=16)
def _input(num_inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(num_inputs)
    return torch.randn(_TOKENS, num_inputs, generator=random).to(device, dtype)


class CheckedPages:
    """The mapped pages of one variant. What is written there is read again and compared with its sums."""

    def __init__(
        self, what: str, target: VirtualRange, nbytes: int, sums: torch.Tensor | None, advice: str
    ) -> None:
        """Check against `sums`, the `row_sums` of all `nbytes`, if given. what, advice: for the error."""
        self._what, self._target, self._nbytes = what, target, nbytes
        self._sums, self._advice = sums, advice

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a view uint8 [end - begin]; its pages must be mapped."""
        return self._target.tensor(torch.uint8, (end - begin,), offset_bytes=begin)

    def put(self, begin: int, source: torch.Tensor) -> None:
        """Write contiguous uint8 [n] at `begin`: whole rows, or up to the end. Raises WrongVariant."""
        self.begin_put(begin, source)()

    def begin_put(self, begin: int, source: torch.Tensor) -> Finish:
        """Begin to write as `put` does. Return what waits for its end and checks it.

        It must be called before the source or the pages may go.
        """
        end = begin + len(source)
        self._target.map_claimed(end)
        sums = RowSums(self.read(begin, end)) if self._sums is not None else None

        def take(start: int, stop: int) -> None:
            if sums:
                sums.take(start - begin, stop - begin)

        if source.device.type == "cpu":
            wait = self._target.begin_write(begin, source, take)
        else:
            self.read(begin, end).copy_(source)
            take(begin, end)
            wait = torch.cuda.current_stream(source.device).synchronize if source.is_cuda else finished

        def finish() -> None:
            wait()
            if sums:
                self._check(sums.found, begin // ROW_BYTES)

        return finish

    def _check(self, found: torch.Tensor, first: int) -> None:
        assert self._sums is not None
        wanted = self._sums[first : first + len(found)]
        if not found.equal(wanted):
            wrong = (found != wanted).nonzero().flatten() + first
            raise WrongVariant(
                f"{self._what}: {len(wrong)} of {num_rows(self._nbytes)} pieces of {ROW_BYTES} bytes differ"
                f" from what was made, the first at byte {int(wrong[0]) * ROW_BYTES}; {self._advice}"
            )
