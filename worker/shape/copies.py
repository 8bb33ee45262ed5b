"""Copy jobs: from a host image, or from the checkpoint, into the mapped pages of a variant."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from worker.memory import VirtualRange
from worker.model.layout import RangePlan
from worker.model.sources import WeightSource
from worker.model.weights import tensors_in
from worker.shape.checks import CheckedPages, row_sums
from worker.shape.copier import CopyJob, MayGoOn

# A millisecond on either device: a copy can be stopped, and rests, after each chunk. Smaller chunks cost more
# calls (1 MiB on a CPU: half as long again).
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 22, 1 << 24

_ADVICE = (
    "memory of the device or of the host is damaged (to make the host's copy again, stop all workers of this"
    " model)"
)

ByteSpan = tuple[int, int]  # [begin, end) in bytes of a range


def host_copy(
    what: str,
    image: torch.Tensor,
    sums: torch.Tensor,
    target: VirtualRange,
    device: torch.device,
    spans: Sequence[ByteSpan],
) -> CopyJob:
    """Return a job that copies `spans`, whole mapped pages, of an image, uint8 [n], and checks each chunk.

    sums: `row_sums` of the image. It raises WrongVariant, which names `what`.
    """
    pages = CheckedPages(what, target, image.numel(), sums, _ADVICE)
    chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _CUDA_CHUNK_BYTES

    def copy(may_go_on: MayGoOn) -> None:
        for begin, end in spans:
            for first in range(begin, end, chunk_bytes):
                pages.put(first, image[first : min(first + chunk_bytes, end)])
                if not may_go_on():
                    return

    nbytes = sum(end - begin for begin, end in spans)
    return CopyJob(nbytes, nbytes, copy)


def source_copy(
    what: str,
    plan: RangePlan,
    source: WeightSource,
    target: VirtualRange,
    spans: Sequence[ByteSpan],
    device: torch.device,
) -> CopyJob:
    """Return a job that lays out a half from the checkpoint and copies `spans` as `host_copy` does.

    It asks after each tensor, some tens of MiB, too, and also raises ModelError.
    """

    def copy(may_go_on: MayGoOn) -> None:
        where = device if source.depends_on_device else torch.device("cpu")
        with suppress(_CopyStopped):
            image = lay_out(plan, source, where, may_go_on).cpu()
            host_copy(what, image, row_sums(image), target, device, spans)(may_go_on)

    return CopyJob(sum(end - begin for begin, end in spans), plan.nbytes, copy)


class _CopyStopped(Exception):
    """The copy may not go on."""


def lay_out(
    plan: RangePlan, source: WeightSource, device: torch.device, may_go_on: MayGoOn = lambda: True
) -> torch.Tensor:
    """Return uint8 [plan.nbytes] in full precision, as it lies in a model's pages."""
    laid_out = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
    tensors = tensors_in(laid_out, plan)
    for each in plan.sources:
        source.fill(each.target(tensors), each)
        if not may_go_on():
            raise _CopyStopped
    return laid_out
