"""What a worker needs to morph: the variants of its models, their order, and who carries morphs out."""

from __future__ import annotations

from pathlib import Path

import torch

from bus.messages import PRECISIONS
from bus.settings import WorkerSettings
from worker.engine.build import MIB
from worker.memory import PagePool
from worker.model import Model
from worker.model.quantized_layout import BITS
from worker.morph.executor import MorphExecutor
from worker.morph.target import Target
from worker.morph.variants import LayerVariants
from worker.morph.verbs import NoVariants, Variants
from worker.profile.order import load_order
from worker.service.loaded import Progress


def load_variants(
    name: str, model: Model, pool: PagePool, settings: WorkerSettings, progress: Progress
) -> Variants:
    if not settings.variants:
        return NoVariants()

    def tell(done: int, total: int) -> None:
        progress(f"{name}: variants in host memory: {done / total:.0%} of {total / MIB:.0f} MiB")

    return LayerVariants(
        model,
        pool,
        precisions=[precision for precision in PRECISIONS if precision in settings.variants],
        method=settings.quantization,
        host_dir=Path(settings.host_dir),
        progress=tell,
    )


def bits_of(variants: Variants) -> list[int]:
    return [BITS[precision] for precision in variants.precisions if precision != "full"]


def layer_order(folder: Path, model: Model, settings: WorkerSettings) -> tuple[list[int], str]:
    if settings.load_format == "dummy":  # a profile would be of other weights
        return list(range(model.config.num_layers)), "front-to-back"
    return load_order(folder, settings.layer_order)


def make_executor(
    worker: str, targets: dict[str, Target], settings: WorkerSettings, device: torch.device
) -> MorphExecutor:
    """On a CPU copying takes cores and memory from the steps: both kinds of work share the allowance."""
    share = settings.morph_share
    if device.type == "cpu":
        return MorphExecutor(worker, targets, step_share=share / 2, copy_share=share / 2)
    return MorphExecutor(worker, targets, step_share=share)
