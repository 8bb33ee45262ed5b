"""What a worker needs to morph: the variants of its models, their order, and who carries morphs out."""

from __future__ import annotations

import torch

from bus.settings import WorkerSettings
from worker.deploy.deployments import SiteDeployments
from worker.deploy.site import Site
from worker.distributed.transport import Transport
from worker.memory import PagePool
from worker.model import Model
from worker.model.layout import degrees
from worker.morph.manager import MorphManager
from worker.morph.reshard import make_resharder
from worker.morph.target import Target
from worker.parallel.grouping import Grouping
from worker.parallel.place import Place
from worker.service.cards import card_of_newcomer
from worker.shape.copier import Copier

# Of an exchange: as large as keeps the cost of its calls small, and no larger.
CPU_STAGE_BYTES, CUDA_STAGE_BYTES = 1 << 23, 1 << 25


def make_executor(
    worker: str,
    site: Site,
    settings: WorkerSettings,
    device: torch.device,
) -> MorphManager:
    """For the models that are there, and those that come. On a CPU copying takes cores and memory from the
    steps: both kinds of work share the allowance."""
    share = settings.morph_share
    of_each = (share / 2, share / 2) if device.type == "cpu" else (share, 1.0)
    return MorphManager(
        worker,
        {},
        step_share=of_each[0],
        copy_share=of_each[1],
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
