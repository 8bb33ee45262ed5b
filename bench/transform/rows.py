"""FFN rows of a layer from TP4 back to TP1, by the ways that a group has: from peers, or from the host.

Peers: `worker.distributed.all_gather`, through outboxes and through sockets. Host: the jobs of the copying
thread, from images in shared memory or, if a model has none, from the checkpoint. All ranks go the same way
at once, as a group does; the layer's pages are mapped before. Then comes what `worker.parallel.rows` chooses
by these rates, for a group whose steps take no time and so hide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.common.engines import take_turns_by_layer
from bench.common.loading import load_model
from bench.transform.ranks import Timed, through_sockets, timed
from worker.distributed.all_gather import all_gather
from worker.distributed.communicator import Communicator
from worker.memory import CpuBackend, PagePool
from worker.model.shard import Shard
from worker.morph.reshard import Resharder, make_resharder
from worker.morph.variants import NoVariants
from worker.parallel.rows import RowChoice, RowCosts, choose_rows
from worker.shape.host_store import HostMemory
from worker.shape.variants import LayerVariants

PAGE_BYTES = 64 * 1024
ALONE = Shard()
PEERS, SOCKETS = "from peers, outboxes", "from peers, sockets"
IMAGE, CHECKPOINT = "from host images", "from the checkpoint"


def measure(
    group: Communicator, folder: Path, rounds: int, stage_bytes: int, shm: Path
) -> dict[str, list[Timed]]:
    """Return the times of each way on one rank: of every layer, in every round."""
    pool = PagePool(CpuBackend(PAGE_BYTES), 2 << 30)
    model = load_model(folder, pool, dtype=torch.float32, max_tp=group.size)
    variants = LayerVariants(model, pool, precisions=(), memory=HostMemory(shm))
    from_image, from_checkpoint = (make_resharder(model, pool, each) for each in (variants, NoVariants()))
    peers = list(range(group.size))
    shards = [Shard(rank, group.size) for rank in peers]

    def gather(layer: int) -> None:
        parts = [from_image.spans(layer, shard) for shard in shards]
        all_gather(from_image.ffn(layer), parts, group, peers, stage_bytes)

    def gather_by_sockets(layer: int) -> None:
        with through_sockets(group):
            gather(layer)

    sources: dict[str, Callable[[int], None]] = {
        PEERS: gather,
        SOCKETS: gather_by_sockets,
        IMAGE: lambda layer: from_image.fill(layer, ALONE)(lambda: True),
        CHECKPOINT: lambda layer: from_checkpoint.fill(layer, ALONE)(lambda: True),
    }
    ways = {name: partial(_widen, from_image, group, bring) for name, bring in sources.items()}
    took = take_turns_by_layer(ways, len(model.layers), rounds)
    variants.release()
    return took


def missing_and_whole(folder: Path, degree: int) -> tuple[int, int]:
    """Return the bytes of a layer's FFN that a rank of the degree lacks, and all bytes."""
    pool = PagePool(CpuBackend(PAGE_BYTES), 2 << 30)
    model = load_model(folder, pool, dtype=torch.float32, max_tp=degree)
    weights = make_resharder(model, pool, NoVariants())
    whole, own = (
        sum(end - begin for begin, end in weights.spans(0, shard)) for shard in (ALONE, Shard(0, degree))
    )
    return whole - own, whole


def chosen(missing: int, whole: int, layers: int, seconds: dict[str, float]) -> dict[str, RowChoice]:
    """Return the choices with host images and without; `seconds` are those of a layer, by way."""
    made = {}
    for way, read in ((IMAGE, missing), (CHECKPOINT, whole)):
        costs = RowCosts(missing * layers, read * layers, read / seconds[way], missing / seconds[PEERS])
        made[way] = choose_rows([costs], layers, 0.0)
    return made


def _widen(weights: Resharder, group: Communicator, bring: Callable[[int], None], layer: int) -> Timed:
    weights.narrow(layer, Shard(group.rank, group.size))
    weights.map(layer, ALONE)
    took, _ = timed(group, lambda: bring(layer))
    weights.widen(layer, ALONE)
    return took
