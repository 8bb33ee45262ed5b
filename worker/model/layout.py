"""The layout of the weights: pure arithmetic from a config to ranges, parameters and their sources.

A layer has a range for its attention and one for its FFN, each with its own pages, so that each can change
its precision alone. In the FFN, `gate`, `up` and (transposed) `down` are [intermediate, hidden]: one
rank's shard of any degree is a run of whole rows in each. The intermediate dimension is padded so that
every such run ends on a page: going to a higher degree is then unmapping, never copying (Gyges, weight
padding). Zero rows change nothing: silu(0) * 0 = 0. Where a row shares few factors with a page, that takes
many rows (Qwen2 7B in bfloat16: 30 %), and lengthening every row a little costs less (17 %).

::

    attention range   qkv [Hq*D + 2*Hkv*D, hidden] | qkv_bias | o [hidden, Hq*D] | o_bias | norms
    FFN range         gate [padded, hidden] | up [padded, hidden] | down [padded, hidden]
    embedding range   embedding [vocab, hidden]
    head range        norm [hidden] | head [vocab, hidden], unless it is tied to the embedding

A later stage of a pipeline has ranges of its layers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from worker.model.config import ModelConfig
from worker.model.shard import Shard

# Alignment of a parameter in its range, for whole cache lines and CUDA's vector loads.
_ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor of the running model as it is stored, padding included."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # strides in elements
    offset_bytes: int
    dtype: torch.dtype
    split: int | None = None  # the dimension that is split over ranks; None: each rank has the whole

    def at(self, shard: Shard) -> Param:
        """Return the rank's part. Raises ValueError if the parameter cannot be split so."""
        if self.split is None:
            return self
        part = shard.part(self.shape[self.split], "parts of a matrix")
        shape = (*self.shape[: self.split], part.stop - part.start, *self.shape[self.split + 1 :])
        skipped = part.start * self.strides[self.split] * self.dtype.itemsize
        return replace(self, shape=shape, offset_bytes=self.offset_bytes + skipped)

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yield [begin, end) in bytes of the range for each index before the split dimension."""
        outer = self.split or 0
        inner = 1 + sum(
            (n - 1) * stride for n, stride in zip(self.shape[outer:], self.strides[outer:], strict=True)
        )
        for index in product(*map(range, self.shape[:outer])):
            skipped = sum(i * stride for i, stride in zip(index, self.strides, strict=False))
            begin = self.offset_bytes + skipped * self.dtype.itemsize
            yield begin, begin + inner * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Padded:
    """The size of a stored FFN matrix: `rows` >= intermediate, `row_size` >= hidden elements per row."""

    rows: int
    row_size: int


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of the checkpoint and where it goes.

    Its rows (columns if `is_transposed`) fill `param[index]` from `row` on.
    """

    tensor: str
    shape: tuple[int, ...]  # shape in the checkpoint
    param: str
    row: int = 0
    index: int | None = None  # index in the param's first dimension, if that counts matrices
    is_transposed: bool = False

    @property
    def is_norm(self) -> bool:
        return self.tensor.endswith("norm.weight")

    def target(self, params: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the rows that this tensor fills."""
        stored = params[self.param] if self.index is None else params[self.param][self.index]
        rows = self.shape[-1] if self.is_transposed else self.shape[0]
        return stored[self.row : self.row + rows]


@dataclass(slots=True)
class RangePlan:
    """The layout of one virtual range of weights."""

    name: str
    params: dict[str, Param] = field(default_factory=dict)
    sources: list[CheckpointTensor] = field(default_factory=list)
    nbytes: int = 0
    padding_bytes: int = 0

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *sources: CheckpointTensor,
        row_size: int | None = None,
        split: int | None = None,
    ) -> None:
        """Put a parameter behind the others; `row_size` elements from row to row (default: no gap)."""
        row_size = row_size or shape[-1]
        sizes = (*shape[1:-1], row_size, 1) if len(shape) > 1 else (1,)
        strides = tuple(math.prod(sizes[i:]) for i in range(len(sizes)))
        offset = -(-self.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.params[name] = Param(shape, strides, offset, dtype, split)
        self.nbytes = offset + math.prod(shape[:1]) * strides[0] * dtype.itemsize
        self.sources.extend(sources)

    def repeated(self, times: int, each_bytes: int) -> RangePlan:
        """Return `times` of this range, one every `each_bytes`.

        Parameters get a first dimension that counts them, and a rank has some of them.
        """
        return RangePlan(
            self.name,
            {
                name: Param(
                    (times, *param.shape),
                    (each_bytes // param.dtype.itemsize, *param.strides),
                    param.offset_bytes,
                    param.dtype,
                    split=0,
                )
                for name, param in self.params.items()
            },
            nbytes=times * each_bytes,
        )

    def at(self, shard: Shard) -> RangePlan:
        """Return the range with the parts that a rank reads. Raises ValueError if it cannot be split so."""
        return replace(self, params={name: param.at(shard) for name, param in self.params.items()})

    def pages(self, page_bytes: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the pages that hold some part of a parameter.

        The shards of one degree, if the range was laid out for it, share only the pages that every rank has.
        """
        is_needed = np.zeros(max(1, -(-self.nbytes // page_bytes)), np.bool_)
        for param in self.params.values():
            for begin, end in param.stretches():
                is_needed[begin // page_bytes : -(-end // page_bytes)] = True
        return is_needed


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """All ranges of a model, or of a stage of it, on one device."""

    embedding: RangePlan | None  # None, like head, in a later stage of a pipeline
    layers: list[tuple[RangePlan, RangePlan]]  # (attention, FFN)
    head: RangePlan | None
    dtype: torch.dtype
    max_tp: int

    def ranges(self) -> Iterator[RangePlan]:
        if self.embedding:
            yield self.embedding
        for layer in self.layers:
            yield from layer
        if self.head:
            yield self.head

    @property
    def weight_bytes(self) -> int:
        """The bytes without padding, in the dtype that is served."""
        elements = sum(math.prod(source.shape) for plan in self.ranges() for source in plan.sources)
        return int(elements * self.dtype.itemsize)

    @property
    def padding_bytes(self) -> int:
        return sum(plan.padding_bytes for plan in self.ranges())


def plan_model(config: ModelConfig, dtype: torch.dtype, page_bytes: int, max_tp: int) -> ModelPlan:
    """Lay out the model, or the stage that the config describes, for degrees up to `max_tp`."""
    padded = pad_ffn(config, dtype, page_bytes, max_tp)
    layers = [
        (_attention(config, dtype, i), _feed_forward(config, dtype, i, padded))
        for i in range(config.first_layer, config.first_layer + config.num_layers)
    ]
    if not config.has_ends:
        return ModelPlan(None, layers, None, dtype, max_tp)
    return ModelPlan(_embedding(config, dtype), layers, _head(config, dtype), dtype, max_tp)


def degrees(config: ModelConfig, max_tp: int) -> list[int]:
    """Return the tensor-parallel degrees of the model: powers of two that divide its KV heads."""
    return [tp for tp in (1, 2, 4, 8, 16) if tp <= max_tp and config.num_kv_heads % tp == 0]


def pad_ffn(config: ModelConfig, dtype: torch.dtype, page_bytes: int, max_tp: int) -> Padded:
    """Return the smallest matrix whose shards, at each degree, are whole numbers of pages.

    A shard of s rows of b bytes ends on a page if s * b is a multiple of it: s of page / gcd(page, b). Only
    row lengths with more factors of two than the one before are worth trying.
    """
    row_bytes: int = config.hidden_size * dtype.itemsize
    largest = degrees(config, max_tp)[-1]
    if largest == 1:
        return Padded(config.intermediate_size, config.hidden_size)
    tried = []
    factor = 1
    while factor <= page_bytes:
        padded_row = -(-row_bytes // factor) * factor
        unit = page_bytes // math.gcd(page_bytes, padded_row) * largest
        rows = -(-config.intermediate_size // unit) * unit
        tried.append((rows * padded_row, padded_row, rows))
        factor *= 2
    _, padded_row, rows = min(tried)
    return Padded(rows, padded_row // dtype.itemsize)


def _embedding(config: ModelConfig, dtype: torch.dtype) -> RangePlan:
    shape = (config.vocab_size, config.hidden_size)
    plan = RangePlan("embedding")
    plan.add("embedding", shape, dtype, CheckpointTensor("model.embed_tokens.weight", shape, "embedding"))
    return plan


def _head(config: ModelConfig, dtype: torch.dtype) -> RangePlan:
    hidden, shape = (config.hidden_size,), (config.vocab_size, config.hidden_size)
    plan = RangePlan("head")
    plan.add("norm", hidden, dtype, CheckpointTensor("model.norm.weight", hidden, "norm"))
    if not config.has_tied_embeddings:
        plan.add("head", shape, dtype, CheckpointTensor("lm_head.weight", shape, "head"))
    return plan


def _attention(config: ModelConfig, dtype: torch.dtype, layer: int) -> RangePlan:
    prefix = f"model.layers.{layer}."
    hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
    qkv_rows = q_size + 2 * kv_size
    starts = {"q": (0, q_size), "k": (q_size, kv_size), "v": (q_size + kv_size, kv_size)}
    plan = RangePlan(f"layer {layer} attention")
    plan.add(
        "qkv",
        (qkv_rows, hidden),
        dtype,
        *(
            CheckpointTensor(f"{prefix}self_attn.{n}_proj.weight", (rows, hidden), "qkv", at)
            for n, (at, rows) in starts.items()
        ),
    )
    if config.has_qkv_bias:
        plan.add(
            "qkv_bias",
            (qkv_rows,),
            dtype,
            *(
                CheckpointTensor(f"{prefix}self_attn.{n}_proj.bias", (rows,), "qkv_bias", at)
                for n, (at, rows) in starts.items()
            ),
        )
    plain: dict[str, tuple[str, tuple[int, ...]]] = {"o": ("self_attn.o_proj.weight", (hidden, q_size))}
    if config.has_o_bias:
        plain["o_bias"] = ("self_attn.o_proj.bias", (hidden,))
    if config.has_qk_norm:
        plain["q_norm"] = ("self_attn.q_norm.weight", (config.head_dim,))
        plain["k_norm"] = ("self_attn.k_norm.weight", (config.head_dim,))
    plain["input_norm"] = ("input_layernorm.weight", (hidden,))
    plain["post_norm"] = ("post_attention_layernorm.weight", (hidden,))
    for name, (tensor, shape) in plain.items():
        plan.add(name, shape, dtype, CheckpointTensor(prefix + tensor, shape, name))
    return plan


def _feed_forward(config: ModelConfig, dtype: torch.dtype, layer: int, padded: Padded) -> RangePlan:
    prefix = f"model.layers.{layer}.mlp."
    hidden, intermediate = config.hidden_size, config.intermediate_size
    plan = RangePlan(f"layer {layer} FFN")
    plan.add(
        "gate_up",
        (2, padded.rows, hidden),
        dtype,
        CheckpointTensor(f"{prefix}gate_proj.weight", (intermediate, hidden), "gate_up", index=0),
        CheckpointTensor(f"{prefix}up_proj.weight", (intermediate, hidden), "gate_up", index=1),
        row_size=padded.row_size,
        split=1,
    )
    plan.add(
        "down",
        (padded.rows, hidden),
        dtype,
        CheckpointTensor(f"{prefix}down_proj.weight", (hidden, intermediate), "down", is_transposed=True),
        row_size=padded.row_size,
        split=0,
    )
    stored, needed = padded.rows * padded.row_size, intermediate * hidden
    plan.padding_bytes = 3 * (stored - needed) * dtype.itemsize
    return plan
