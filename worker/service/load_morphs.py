"""What a worker needs to morph: the variants of its models, their order, and who carries morphs out."""

from __future__ import annotations

from pathlib import Path

import torch

from bus.precisions import BITS, PRECISIONS
from bus.settings import WorkerSettings
from worker.deploy.deployments import SiteDeployments
from worker.deploy.site import Site
from worker.distributed.transport import Transport
from worker.engine.build import MIB
from worker.memory import PagePool
from worker.model import Model
from worker.model.layout import degrees
from worker.morph.manager import MorphManager
from worker.morph.reshard import make_resharder
from worker.morph.target import Target
from worker.morph.verbs import NoVariants, Variants
from worker.parallel.grouping import Grouping
from worker.parallel.morphs import GroupMorphs
from worker.parallel.place import Place
from worker.service.cards import card_of_newcomer
from worker.service.loaded import Progress
from worker.shape.copier import Copier
from worker.shape.layer_order import load_order
from worker.shape.variants import LayerVariants

# Of an exchange: as large as keeps the cost of its calls small, and no larger.
CPU_STAGE_BYTES, CUDA_STAGE_BYTES = 1 << 23, 1 << 25


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
    worker: str,
    site: Site,
    settings: WorkerSettings,
    device: torch.device,
    grouping: Grouping | None,
) -> MorphManager:
    """For the models that are there, and those that come. On a CPU copying takes cores and memory from the
    steps: both kinds of work share the allowance."""
    share = settings.morph_share
    of_each = (share / 2, share / 2) if device.type == "cpu" else (share, 1.0)
    return MorphManager(
        worker,
        {name: resident.target for name, resident in site.residents.items()},
        step_share=of_each[0],
        copy_share=of_each[1],
        groups=GroupMorphs(grouping, layers_per_step=settings.layers_per_step) if grouping else None,
        deployments=SiteDeployments(site, card_of_newcomer),
    )


def grouping_for(
    name: str,
    target: Target,
    model: Model,
    pool: PagePool,
    settings: WorkerSettings,
    worker: str,
    transport: Transport | None,
) -> Grouping | None:
    """Return how a worker's only model joins groups; None if it cannot."""
    if not transport or len(degrees(model.config, settings.max_tp)) < 2:
        return None
    device = pool.backend.device
    place = Place(
        name=name,
        target=target,
        model=model,
        weights=make_resharder(model, pool, target.variants),
        copier=Copier(lambda: grouping.post(lambda: None)),
        stage_bytes=CPU_STAGE_BYTES if device.type == "cpu" else CUDA_STAGE_BYTES,
    )
    grouping = Grouping(
        worker,
        place,
        transport,
        device=str(device),
    )
    return grouping
