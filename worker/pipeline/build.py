"""From a loaded first stage to an instance whose other stages stand by."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from worker.core import Limits
from worker.memory import KVCache
from worker.model import Model, ModelError
from worker.pipeline.instance import PipelinedInstance
from worker.pipeline.pipeline import Behind, Pipeline


def start_leading(
    instance_id: str,
    worker: str,
    model: Model,
    cache: KVCache,
    limits: Limits,
    behind: Sequence[Behind],
    *,
    timeout_s: float,
    wake: Callable[[], None],
    blocks: int = 1,
    digest: str = "",
) -> Generator[bool, None, PipelinedInstance]:
    """Steps of the engine's thread, as those of a morph: False where it waits for the others. All stages keep
    as many blocks as the one with the fewest has. Raises PipelineLost, and ModelError for fewer than
    `blocks`; then, and when it is closed, the others have given all back, and the model and the cache are as
    the caller's.
    """
    device = cache.pool.backend.device
    pipeline = Pipeline(
        instance_id, worker, behind, timeout_s=timeout_s, wake=wake, is_gpu=device.type == "cuda"
    )
    try:
        pipeline.join(model.config, model.dtype, limits.block_tokens, digest)
        while not pipeline.is_joined:
            yield False
        if (fewest := min(cache.num_blocks, pipeline.num_blocks_possible)) < blocks:
            raise ModelError(
                f"{instance_id}: {blocks} KV blocks are wanted at every stage; {worker} has room for"
                f" {cache.num_blocks}, the others for {pipeline.num_blocks_possible}"
            )
        cache.limit(fewest)
        pipeline.start(fewest)
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
        raise
