"""Whole models loaded in one call, for benchmarks and tests; workers load theirs beside their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from worker.memory import PagePool
from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.layout import ModelPlan, plan_model, whole_sources
from worker.model.model import DTYPES, Model
from worker.model.ready_weights import open_checkpoint
from worker.model.shard import ALONE, Shard
from worker.model.sources import RandomWeights, WeightSource
from worker.model.weights import ModelWeights, OnProgress, check_budget, reserve_weights, view_mapped
from worker.profiler.fingerprint import CutPlan, Fingerprint

LoadFormat = Literal["safetensors", "dummy"]


def load_model(
    path: str | Path,
    pool: PagePool,
    *,
    dtype: torch.dtype | None = None,
    load_format: LoadFormat = "safetensors",
    max_tp: int = 1,
    seed: int = 0,
    progress: OnProgress | None = None,
    layers: tuple[int, int] | None = None,
    rank: Shard = ALONE,
    context: int = 0,
) -> Model:
    """Load a Hugging Face folder into the pool, on the pool's device.

    dtype: to serve in; None: the checkpoint's. load_format "dummy" needs only a config.json and draws the
    weights from `seed`. max_tp: the largest tensor-parallel degree to lay the weights out for. progress is
    called with the bytes done and the bytes in all after every tensor. layers: [first, end) of a stage; the
    first stage also has embedding and head. rank: of a fixed degree, whose part is loaded. context: the
    tokens of the longest sequence; 0: the config's.

    Raises ModelError, before a page is mapped if possible. A load that fails frees all its pages.
    """
    config = read_config(Path(path)).up_to(context)
    if layers is not None:
        config = config.part(*layers)
    config = config.of_rank(rank)
    dtype = dtype or config.dtype
    if dtype not in DTYPES:
        raise ModelError(
            f"{config.folder}: dtype {dtype} is not supported; these are: {', '.join(map(str, DTYPES))}"
        )
    plan = plan_model(config, dtype, pool.page_bytes, max_tp)
    source: WeightSource = RandomWeights(seed) if load_format == "dummy" else open_checkpoint(config)
    weights = _load_weights(config, plan, pool, source, progress)
    return Model(config, plan, weights, source)


def load_fingerprint(plan: CutPlan, pool: PagePool) -> Fingerprint:
    """Load a fingerprint. Raises as its methods do, and then frees all its pages."""
    fingerprint = Fingerprint(plan, pool)
    try:
        assert all(fingerprint.map())
        fingerprint.fill()
        fingerprint.build()
    except BaseException:
        fingerprint.release()
        raise
    return fingerprint


def _load_weights(
    config: ModelConfig,
    plan: ModelPlan,
    pool: PagePool,
    source: WeightSource,
    progress: OnProgress | None = None,
) -> ModelWeights:
    """Map and fill every range, tensor by tensor, straight into place.

    Everything that can be known is checked before a page is mapped. Raises ModelError, and MappingFailed from
    the system; then nothing stays mapped.
    """
    source.check(whole_sources(config))
    weights = reserve_weights(config.folder.name, plan, pool)
    done = 0
    try:
        check_budget(config, plan, pool, weights.size.mapped // pool.page_bytes)
        for loaded, part in zip(weights.ranges(), plan.ranges(), strict=True):
            loaded.memory.map(0, loaded.memory.num_pages)  # padding needs no filling: a new page is zeros
            view_mapped(loaded, part)
            for tensor in part.sources:
                targets = tensor.targets(loaded.tensors)
                source.fill(targets, tensor)
                done += sum(target.numel() * target.itemsize for target in targets)
                if progress:
                    progress(done, plan.weight_bytes)
    except BaseException:
        weights.release()
        raise
    return weights
