"""A model folder, loaded into the page pool and ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from kernels import AttentionPlan
from worker.memory import KVCache, PagePool
from worker.model.config import ModelConfig, read_config
from worker.model.errors import ModelError
from worker.model.layout import plan_model
from worker.model.shard import Shard
from worker.model.sources import Checkpoint, RandomWeights
from worker.model.transformer import Attention, FeedForward, Layer, Transformer
from worker.model.weights import LayerWeights, ModelWeights, Progress, WeightBytes, load_weights

LoadFormat = Literal["safetensors", "dummy"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Model:
    """Weights in the pool and the transformer over them. One thread runs it."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, dtype: torch.dtype, shard: Shard) -> None:
        self.config, self.dtype, self.shard = config, dtype, shard
        self._weights = weights
        embedding, head = weights.embedding.tensors["embedding"], weights.head.tensors
        self._transformer = Transformer(
            config,
            [_layer(config, layer, i, shard) for i, layer in enumerate(weights.layers)],
            embedding=embedding,
            norm=head["norm"],
            head=head.get("head", embedding),
        )

    @property
    def size(self) -> WeightBytes:
        return self._weights.size

    def forward(
        self, token_ids: torch.Tensor, plan: AttentionPlan, kv: KVCache, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """One step: token_ids int64 [T], packed as `plan` says; float32 [R, vocab] for logit_rows int64 [R].

        The step's keys and values are in `kv` afterwards.
        """
        return self._transformer.forward(token_ids, plan, kv.layers, logit_rows)

    def release(self) -> None:
        """Give all pages back. The model cannot run any more."""
        del self._transformer
        self._weights.release()


def load_model(
    path: str | Path,
    pool: PagePool,
    *,
    dtype: torch.dtype | None = None,
    load_format: LoadFormat = "safetensors",
    max_tp: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Model:
    """Load a Hugging Face folder into the pool, on the pool's device.

    dtype: what to serve in; None: the checkpoint's. load_format "dummy" needs only a config.json and draws
    the weights from `seed`. max_tp: largest tensor-parallel degree to lay the weights out for. progress is
    called with the bytes done and the bytes in all after every tensor.
    Raises ModelError, naming what is wrong, before a page is mapped wherever that can be known; a load that
    fails gives all pages back.
    """
    config = read_config(Path(path))
    dtype = dtype or config.dtype
    if dtype not in DTYPES:
        raise ModelError(
            f"{config.folder}: dtype {dtype} is not supported; these are: {', '.join(map(str, DTYPES))}"
        )
    plan = plan_model(config, dtype, pool.page_bytes, max_tp)
    source = RandomWeights(seed) if load_format == "dummy" else Checkpoint(config.folder)
    weights = load_weights(config, plan, pool, source, progress)
    return Model(config, weights, dtype, Shard())


def _layer(config: ModelConfig, weights: LayerWeights, i: int, shard: Shard) -> Layer:
    return Layer(
        Attention(config, weights.attention.tensors, shard, config.sliding_windows[i]),
        FeedForward(config, weights.feed_forward.tensors, shard),
    )
