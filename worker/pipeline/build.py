"""From loaded layers to a stage that stands by, and to the instance of a leader."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from worker.core import Limits
from worker.engine.build import make_cache
from worker.memory import KVCache, PagePool
from worker.model import Model, ModelError
from worker.pipeline.follower import Part
from worker.pipeline.instance import PipelinedInstance
from worker.pipeline.pipeline import Behind, Pipeline


def part_of(
    pipeline: str,
    stage: int,
    epoch: int,
    model: Model,
    pool: PagePool,
    limits: Limits,
    *,
    reserve_pages: int = 0,
    digest: str = "",
) -> Part:
    """A later stage: addresses for a cache, and no page in it before the leader says how many. Raises
    MappingFailed."""
    return Part(
        pipeline=pipeline,
        stage=stage,
        epoch=epoch,
        model=model,
        cache=make_cache(pool, model, limits, pipeline),
        spare_pages=lambda: pool.num_free - reserve_pages,
        digest=digest,
    )


def start_leading(
    instance_id: str,
    worker: str,
    model: Model,
    pool: PagePool,
    limits: Limits,
    behind: Sequence[Behind],
    *,
    blocks: int,
    timeout_s: float,
    wake: Callable[[], None],
    reserve_pages: int = 0,
    max_blocks: int = 0,
    digest: str = "",
) -> Generator[bool, None, PipelinedInstance]:
    """Steps of the engine's thread, as those of a morph: False where it waits for the others. All stages get
    as many blocks as the one with the least room can have, and as are of use; max_pages: that the leader's
    own cache may take, if not all. Raises PipelineLost, ModelError for
    fewer than `blocks`, MappingFailed; then, and when it is closed, nothing is kept, the model's pages apart.
    """
    device = pool.backend.device
    pipeline = Pipeline(
        instance_id, worker, behind, timeout_s=timeout_s, wake=wake, is_gpu=device.type == "cuda"
    )
    cache: KVCache | None = None
    try:
        pipeline.join(model.config, model.dtype, limits.block_tokens, digest)
        while not pipeline.is_joined:
            yield False
        own = _room(model, pool, limits, pool.num_free - reserve_pages)
        num_blocks = min(own, pipeline.num_blocks_possible, max_blocks or own)
        if num_blocks < max(1, blocks):
            raise ModelError(
                f"{instance_id}: room for {own} KV blocks here and for {pipeline.num_blocks_possible} at the"
                f" stage behind that has the least; {blocks} are wanted"
            )
        # Its addresses end with what the others have, so that nothing lets it grow beyond.
        cache = make_cache(pool, model, limits, instance_id, num_blocks)
        cache.grow(cache.pages_for(num_blocks))
        pipeline.start(num_blocks)
        while not pipeline.is_started:
            yield False
        return PipelinedInstance(
            instance_id,
            model,
            cache,
            limits,
            pipeline,
            vocab_size=model.config.vocab_size,
            device=device,
        )
    except BaseException as error:
        pipeline.close(str(error) or type(error).__name__)
        if cache:
            cache.release()
        raise


def _room(model: Model, pool: PagePool, limits: Limits, spare_pages: int) -> int:
    """KV blocks in so many pages of all layers together; no more than all sequences could use."""
    layers = model.config.num_layers
    each = model.config.kv_block_bytes(limits.block_tokens, model.dtype) // layers
    useful = limits.max_num_seqs * -(-limits.max_model_len // limits.block_tokens)
    return min(useful, max(0, spare_pages) // layers * pool.page_bytes // each)
