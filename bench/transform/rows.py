"""FFN rows of a layer from TP4 back to TP1, by the ways that a group has: from peers, or from their hosts.

Peers: `worker.distributed.all_gather`, through outboxes and through sockets. Host: the copying thread's jobs,
from images in shared memory or, where a model has none, from the checkpoint. All ranks go the same way at
once, as a group does; the layer's pages are mapped before. Then what `worker.parallel.rows` chooses by these
rates, for a group whose steps take no time and so hide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.transform.ranks import Timed, timed
from worker.distributed import carriers
from worker.distributed.all_gather import all_gather
from worker.distributed.communicator import Communicator
from worker.memory import CpuBackend, PagePool
from worker.model import load_model
from worker.model.shard import Shard
from worker.morph.reshard import Resharder, make_resharder
from worker.morph.verbs import NoVariants
from worker.parallel.rows import Choice, RowCosts, choose
from worker.shape.variants import LayerVariants

PAGE_BYTES = 64 * 1024
ALONE = Shard()
PEERS, SOCKETS = "from peers, outboxes", "from peers, sockets"
IMAGE, CHECKPOINT = "from host images", "from the checkpoint"


def measure(
    group: Communicator, folder: Path, rounds: int, stage_bytes: int, shm: Path
) -> dict[str, list[Timed]]:
    """On one rank, of each way: every layer of every round, where the ways take turns. The first round warms
    up."""
    pool = PagePool(CpuBackend(PAGE_BYTES), 2 << 30)
    model = load_model(folder, pool, dtype=torch.float32, max_tp=group.size)
    variants = LayerVariants(model, pool, precisions=(), host_dir=shm)
    from_image, from_checkpoint = (make_resharder(model, pool, each) for each in (variants, NoVariants()))
    peers = list(range(group.size))
    shards = [Shard(rank, group.size) for rank in peers]

    def gather(layer: int) -> None:
        parts = [from_image.spans(layer, shard) for shard in shards]
        all_gather(from_image.ffn(layer), parts, group, peers, stage_bytes)

    def gather_by_sockets(layer: int) -> None:
        with _no_outboxes(group):
            gather(layer)

    ways: dict[str, Callable[[int], None]] = {
        PEERS: gather,
        SOCKETS: gather_by_sockets,
        IMAGE: lambda layer: from_image.fill(layer, ALONE)(lambda: True),
        CHECKPOINT: lambda layer: from_checkpoint.fill(layer, ALONE)(lambda: True),
    }
    took: dict[str, list[Timed]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, bring in ways.items():
            for layer in range(len(model.layers)):
                one = _widen(from_image, group, layer, bring)
                if turn:
                    took[way].append(one)
    variants.release()
    return took


def missing_and_whole(folder: Path, degree: int) -> tuple[int, int]:
    """Bytes of a layer's FFN that a rank of the degree misses, and all."""
    pool = PagePool(CpuBackend(PAGE_BYTES), 2 << 30)
    model = load_model(folder, pool, dtype=torch.float32, max_tp=degree)
    weights = make_resharder(model, pool, NoVariants())
    whole, own = (
        sum(end - begin for begin, end in weights.spans(0, shard)) for shard in (ALONE, Shard(0, degree))
    )
    return whole - own, whole


def chosen(missing: int, whole: int, layers: int, seconds: dict[str, float]) -> dict[str, Choice]:
    """With host images and without. seconds: of a layer, by way."""
    made = {}
    for way, read in ((IMAGE, missing), (CHECKPOINT, whole)):
        costs = RowCosts(missing * layers, read * layers, read / seconds[way], missing / seconds[PEERS])
        made[way] = choose([costs], layers, 0.0)
    return made


def _widen(weights: Resharder, group: Communicator, layer: int, bring: Callable[[int], None]) -> Timed:
    weights.narrow(layer, Shard(group.rank, group.size))
    weights.map(layer, ALONE)
    took, _ = timed(group, lambda: bring(layer))
    weights.widen(layer, ALONE)
    return took


@contextmanager
def _no_outboxes(group: Communicator) -> Iterator[None]:
    boxes = carriers._boxes.pop(group, None)
    carriers._boxes[group] = None
    yield
    carriers._boxes.pop(group)
    if boxes:
        carriers._boxes[group] = boxes
