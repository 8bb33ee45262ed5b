"""From where a model was loaded into the pages of a half: for layers of which the host has no images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.memory import VirtualRange
from worker.model.layout import RangePlan
from worker.model.sources import Weights
from worker.model.weights import tensors_in
from worker.morph.host_copy import HostCopy, Span
from worker.morph.sums import row_sums


class SourceCopy:
    """Lays the half out in host memory as it was at load, tensor by tensor, and copies these parts of it."""

    def __init__(
        self,
        what: str,
        plan: RangePlan,
        source: Weights,
        target: VirtualRange,
        spans: Sequence[Span],
        device: torch.device,
    ) -> None:
        """plan: of full precision. spans: whole pages that are mapped."""
        self._what, self._plan, self._source = what, plan, source
        self._target, self._spans, self._device = target, spans, device

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self._spans)

    @property
    def read_bytes(self) -> int:
        """The whole half, however little of it is wanted."""
        return self._plan.nbytes

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Asks after each tensor, some tens of MiB, and then as a `HostCopy` does. Raises ModelError too."""
        where = self._device if self._source.depends_on_device else torch.device("cpu")
        try:
            image = lay_out(self._plan, self._source, where, may_go_on).cpu()
        except _Stopped:
            return
        HostCopy(self._what, image, row_sums(image), self._target, self._device, self._spans)(may_go_on)


class _Stopped(Exception):
    """It may not go on."""


def lay_out(
    plan: RangePlan, source: Weights, device: torch.device, may_go_on: Callable[[], bool] = lambda: True
) -> torch.Tensor:
    """uint8 [plan.nbytes] in full precision, as it lies in the pages of a model. Asks after each tensor."""
    laid_out = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
    tensors = tensors_in(laid_out, plan)
    for each in plan.sources:
        source.fill(each.target(tensors), each)
        if not may_go_on():
            raise _Stopped
    return laid_out
