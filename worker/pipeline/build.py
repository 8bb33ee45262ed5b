"""Start the leader of a pipeline: from a loaded first stage to an instance whose other stages stand by."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from worker.distributed.communicator import PeerLost
from worker.distributed.messages import Peer
from worker.distributed.rendezvous import new_rendezvous
from worker.distributed.secure import ClusterTLS
from worker.engine.core import EngineCore
from worker.engine.grammars import GrammarCompiler
from worker.engine.sequence import Limits
from worker.memory import KVCache
from worker.model import Model, ModelError
from worker.model.shard import Shard
from worker.morph.losses import Losses
from worker.morph.resizer import KVResizer
from worker.morph.target import MemberTarget, Target
from worker.morph.variants import Variants
from worker.pipeline.executor import PipelineExecutor
from worker.pipeline.pipeline import Pipeline, PipelineLost, RemoteStage
from worker.pipeline.ranks import Ranks


def stage_target(
    model: Model, cache: KVCache, variants: Variants, *, useful_blocks: int, reserve_pages: int = 0
) -> MemberTarget:
    """Return what morphs change at a later stage, or at another rank than the leader of the first."""
    resizer = KVResizer(None, cache, reserve_pages=reserve_pages, useful_blocks=useful_blocks, is_stage=True)
    return MemberTarget(model.shape, variants, resizer, model.config.first_layer)


def leader_target(
    instance: EngineCore,
    cache: KVCache,
    variants: Variants,
    order: Sequence[int],
    losses: Losses | None = None,
    *,
    useful_blocks: int,
    own_pages: int = 0,
    reserve_pages: int = 0,
) -> Target:
    """Return the instance as morphs see it. own_pages: that its KV gave up for all to have as many blocks."""
    resizer = KVResizer(
        instance, cache, reserve_pages=reserve_pages, useful_blocks=useful_blocks, is_stage=True
    )
    resizer.own_pages = own_pages
    return Target(instance, variants, resizer, order, losses)


def start_leading(
    instance_id: str,
    worker: str,
    model: Model,
    cache: KVCache,
    limits: Limits,
    behind: Sequence[RemoteStage],
    *,
    beside: Sequence[Peer] = (),
    host: str = "127.0.0.1",
    timeout_s: float,
    wake: Callable[[], None],
    tls: ClusterTLS | None = None,
    blocks: int = 1,
    digest: str = "",
    grammars: GrammarCompiler | None = None,
) -> Generator[bool, None, EngineCore]:
    """Bring the stages together and return the engine core, as steps of a morph.

    beside: the other ranks of the leader's own stage, who reach it at `host`. grammars: None where no request
    has one. All stages keep as many blocks as the worker with the fewest. Raises PipelineLost, and ModelError
    for fewer than `blocks`; then, and when it is closed, the others have given all back; the model and the
    cache are the caller's.
    """
    device = cache.pool.backend.device
    pipeline = Pipeline(
        instance_id,
        worker,
        behind,
        beside=beside,
        timeout_s=timeout_s,
        wake=wake,
        is_gpu=device.type == "cuda",
        tls=tls,
    )
    ranks = Ranks(Shard(0, 1 + len(beside)), host, str(device), timeout_s, wake)
    try:
        page_bytes, precision = cache.pool.page_bytes, cache.precision
        pipeline.join(model.config, model.dtype, limits.block_tokens, page_bytes, digest, precision)
        while not pipeline.is_joined:
            yield False
        if (fewest := min(cache.num_blocks, pipeline.num_blocks_possible)) < blocks:
            raise ModelError(
                f"{instance_id}: {blocks} KV blocks are wanted at every stage; {worker} has room for"
                f" {cache.num_blocks}, the others for {pipeline.num_blocks_possible}"
            )
        cache.shrink(max(0, cache.pages_per_layer - cache.pages_for(fewest)))
        rendezvous = new_rendezvous()
        pipeline.start(fewest, rendezvous, ranks.store)
        ranks.meet(rendezvous, ranks.store)
        while not (pipeline.is_started and ranks.have_met):
            yield False
        return EngineCore(
            instance_id,
            model,
            cache,
            limits,
            vocab_size=model.config.vocab_size,
            device=device,
            executor=PipelineExecutor(model, cache, pipeline, ranks),
            grammars=grammars,
        )
    except BaseException as error:
        pipeline.close(str(error) or type(error).__name__)
        ranks.close()
        if isinstance(error, PeerLost):
            raise PipelineLost(f"the ranks of stage 0 did not meet: {error}") from error
        raise
