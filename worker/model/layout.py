"""The layout of the weights: pure arithmetic from a config to ranges, parameters and their sources.

A layer has a range for its attention and one for its FFN, each with its own pages, so that each can change
its precision alone. In the FFN, `gate`, `up` and (transposed) `down` are [intermediate, hidden], and their
rows are divided evenly into units, the shards of the largest degree (`worker.model.row_units`). One rank's
shard of any degree is a run of units, and each unit ends on a page: going to a higher degree is then
unmapping, never copying (Gyges, weight padding). A unit's three parts lie together, so that padding is less
than a page to a unit, and no product reads it. If the rows that each unit has of a matrix fill pages anyway,
matrices lie whole instead, and a rank multiplies by one piece of each.

::

    attention range   qkv [Hq*D + 2*Hkv*D, hidden] | qkv_bias | o [hidden, Hq*D] | o_bias | sinks | norms
    FFN range         unit 0 | unit 1 | ... | biases        each unit padded to whole pages
    unit              gate [rows, hidden] | up [rows, hidden] | down [rows, hidden]
    FFN range, whole  gate [intermediate, hidden] | up [intermediate, hidden] | down | biases
    embedding range   embedding [vocab, hidden]
    head range        norm [hidden] | head [vocab, hidden], unless it is tied to the embedding | head_bias

A plain FFN has no gate. The norms around the FFN are small and lie in the attention's range. One with mean
and bias is [2, hidden]; one of 1 + w is stored as that sum, in float32. Every rank has the biases of the FFN
whole.

The names of tensors are the family's (`bus.families.TensorNames`). Of a fused tensor each part takes its
rows. If dimension 2 i of a head turns with 2 i + 1, its rows are loaded in the order 0, 2, ... 1, 3, ...: the
products of queries and keys stay the same, and one rotary kernel serves both kinds.

In a mixture of experts a rank has whole experts. They lie one after the other, a little apart, so that the
experts of each shard end on a page; every rank has the router.

::

    expert            gate_up [2, intermediate, hidden] | down [hidden, intermediate] | biases
    FFN range         expert 0 | expert 1 | ... | router [experts, hidden] | router_bias

A shared expert lies among them in slices as wide as an expert (`kernels.routing.shared_units`), so that all
that holds for experts holds for it. They are spread evenly: ranks have equally many if there are as many
slices as ranks or a multiple, else some have one more than others. The router's last row is its gate.

A later stage of a pipeline has ranges of its layers only. A rank of a fixed degree has its part of each
range (`worker.model.cut`), without padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.routing import shared_units
from worker.model.config import Mixture, ModelConfig
from worker.model.cut import can_deal_heads
from worker.model.row_units import RowUnits, full_units
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
        """Yield [begin, end) in bytes of the range for each index of what lies around the split dimension."""
        sizes = list(zip(self.shape, self.strides, strict=True))
        widest = math.inf if self.split is None else self.strides[self.split]
        outer = [(n, stride) for n, stride in sizes if stride > widest]
        inner = 1 + sum((n - 1) * stride for n, stride in sizes if stride <= widest)
        for index in product(*(range(n) for n, _ in outer)):
            skipped = sum(i * stride for i, (_, stride) in zip(index, outer, strict=True))
            begin = self.offset_bytes + skipped * self.dtype.itemsize
            yield begin, begin + inner * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of the checkpoint and where it goes.

    Its rows (columns if `is_transposed`) fill `param[index]` from `row` on, plus `offset`. With `units` they
    fill `param[unit, index]` of one unit after the other.
    """

    tensor: str
    shape: tuple[int, ...]  # shape in the checkpoint
    param: str
    row: int = 0
    index: tuple[int, ...] = ()  # index in the param's first dimensions, if these count matrices
    is_transposed: bool = False
    rows: range | None = None  # of the tensor's rows, those that go there; None: all
    expert: int | None = None  # of a tensor that stacks experts, the one that goes there
    columns: range | None = None  # of the last dimension, those that go there; None: all
    offset: float = 0.0
    units: RowUnits | None = None

    @property
    def is_norm(self) -> bool:
        return self.param.endswith("norm") and self.tensor.endswith("weight")

    @property
    def numel(self) -> int:
        """The number of elements that go there."""
        return math.prod(self.part_shape)

    @property
    def num_rows(self) -> int:
        return self.part_shape[0]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what goes there, before it is transposed."""
        shape = list(self.shape if self.expert is None else self.shape[1:])
        if self.rows is not None:
            shape[0] = len(self.rows)
        if self.columns is not None:
            shape[-1] = len(self.columns)
        return tuple(shape)

    def targets(self, params: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the runs of rows that this tensor fills, one after the other."""
        stored = params[self.param]
        if self.units is None:
            rows = self.part_shape[-1] if self.is_transposed else self.num_rows
            return [stored[self.index][self.row : self.row + rows]]
        return [stored[(unit, *self.index)][: len(rows)] for unit, rows in enumerate(self.units) if len(rows)]


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
    ) -> None:
        """Put a parameter behind the others."""
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        offset = -(-self.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.params[name] = Param(shape, strides, offset, dtype)
        self.nbytes = offset + math.prod(shape) * dtype.itemsize
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

    def side_by_side(self, times: int) -> RangePlan:
        """Return `times` of this range as `repeated` does, but with the rows of each matrix in one run."""
        made = RangePlan(self.name)
        for name, param in self.params.items():
            *outer, rows, columns = param.shape
            made.add(name, (*outer, times, rows, columns), param.dtype)
            *outer_strides, unit, row, column = made.params[name].strides
            strides = (unit, *outer_strides, row, column)
            made.params[name] = replace(
                made.params[name], shape=(times, *param.shape), strides=strides, split=0
            )
        return made

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
        elements = sum(source.numel for plan in self.ranges() for source in plan.sources)
        return int(elements * self.dtype.itemsize)

    @property
    def padding_bytes(self) -> int:
        return sum(plan.padding_bytes for plan in self.ranges())


def plan_model(config: ModelConfig, dtype: torch.dtype, page_bytes: int, max_tp: int) -> ModelPlan:
    """Lay out the model, or the stage that the config describes, for degrees up to `max_tp`.

    A rank of a fixed degree stays at it, whatever `max_tp` is: its ranges have no padding.
    """
    max_tp = 1 if config.cut else max_tp

    def feed_forward(layer: int) -> RangePlan:
        if config.mixture:
            return _experts(config, config.mixture, dtype, layer, page_bytes, max_tp)
        return _feed_forward(config, dtype, layer, page_bytes, max_tp)

    layers = [
        (_attention(config, dtype, i), feed_forward(i))
        for i in range(config.first_layer, config.first_layer + config.num_layers)
    ]
    if not config.has_ends:
        return ModelPlan(None, layers, None, dtype, max_tp)
    return ModelPlan(_embedding(config, dtype), layers, _head(config, dtype), dtype, max_tp)


def whole_sources(config: ModelConfig) -> list[CheckpointTensor]:
    """Return every tensor of these layers, those of other ranks too, with its shape in the checkpoint."""
    plan = plan_model(config.whole, config.dtype, page_bytes=4096, max_tp=1)
    return [source for part in plan.ranges() for source in part.sources]


def degrees(config: ModelConfig, max_tp: int) -> list[int]:
    """Return the tensor-parallel degrees of the model: powers of two among which heads and experts divide.

    Where there are fewer KV heads than ranks, several ranks have the same one (`worker.model.cut`).
    """
    heads, num_units = config.num_heads, config.mixture.num_units if config.mixture else 0
    possible = (tp for tp in (1, 2, 4, 8, 16) if tp <= max_tp and num_units % tp == 0)
    return [tp for tp in possible if can_deal_heads(heads, config.num_kv_heads, tp)]


def pad_expert(config: ModelConfig, mixture: Mixture, expert_bytes: int, page_bytes: int, max_tp: int) -> int:
    """Return the bytes from one expert to the next with which the experts of every shard end on a page."""
    largest = degrees(config, max_tp)[-1]
    unit = page_bytes // math.gcd(page_bytes, mixture.num_units // largest) if largest > 1 else 1
    unit = math.lcm(unit, _ALIGN_BYTES)
    return -(-expert_bytes // unit) * unit


def _embedding(config: ModelConfig, dtype: torch.dtype) -> RangePlan:
    plan, shape = RangePlan("embedding"), (config.vocab_size, config.hidden_size)
    _add_whole(plan, "embedding", config.names.embedding, shape, dtype, config.own.vocab)
    return plan


def _head(config: ModelConfig, dtype: torch.dtype) -> RangePlan:
    names, vocab, own = config.names, config.vocab_size, config.own.vocab
    plan = RangePlan("head")
    _add_norm(plan, config, "norm", names.norm, config.hidden_size, dtype)
    if not config.has_tied_embeddings:
        _add_whole(plan, "head", names.head, (vocab, config.hidden_size), dtype, own)
    if config.has_head_bias:
        _add_whole(plan, "head_bias", names.head, (vocab,), dtype, own)
    return plan


def _attention(config: ModelConfig, dtype: torch.dtype, layer: int) -> RangePlan:
    names, prefix = config.names, f"{config.names.layer}.{layer}."
    hidden, q_size, own = config.hidden_size, config.q_size, config.own
    qkv_rows = q_size + 2 * config.kv_size
    plan = RangePlan(f"layer {layer} attention")
    plan.add("qkv", (qkv_rows, hidden), dtype, *_qkv(config, prefix, "qkv", (hidden,)))
    if config.has_qkv_bias:
        plan.add("qkv_bias", (qkv_rows,), dtype, *_qkv(config, prefix, "qkv_bias", ()))
    columns = range(own.heads.start * config.head_dim, own.heads.stop * config.head_dim)
    o_shape = (hidden, config.whole.q_size)
    o = CheckpointTensor(f"{prefix}{names.o}.weight", o_shape, "o", columns=_some(columns, o_shape[1]))
    plan.add("o", (hidden, q_size), dtype, o)
    if config.has_o_bias and not own.rank.rank:
        _add_whole(plan, "o_bias", prefix + names.o, (hidden,), dtype)
    if config.has_sinks:
        shape = (own.sizes.heads,)
        sinks = CheckpointTensor(prefix + names.sinks, shape, "sinks", rows=_some(own.heads, *shape))
        plan.add("sinks", (config.num_heads,), dtype, sinks)
    if config.has_qk_norm:
        _add_norm(plan, config, "q_norm", prefix + names.q_norm, config.head_dim, dtype)
        _add_norm(plan, config, "k_norm", prefix + names.k_norm, config.head_dim, dtype)
    for norm in ("input_norm", "ffn_norm", "attention_out_norm", "ffn_out_norm"):
        if module := getattr(names, norm):
            _add_norm(plan, config, norm, prefix + module, hidden, dtype)
    return plan


def _some(part: range, size: int) -> range | None:
    """Return the part of so many rows or columns that is loaded; None: all of them."""
    return None if len(part) == size else part


def _add_whole(
    plan: RangePlan,
    name: str,
    module: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: range | None = None,
) -> None:
    """Add a weight, or the bias of an output, as it is, or these rows of it."""
    ending = "bias" if len(shape) == 1 else "weight"
    rows = rows or range(shape[0])
    source = CheckpointTensor(f"{module}.{ending}", shape, name, rows=_some(rows, shape[0]))
    plan.add(name, (len(rows), *shape[1:]), dtype, source)


def _add_norm(
    plan: RangePlan, config: ModelConfig, name: str, module: str, width: int, dtype: torch.dtype
) -> None:
    weight, shape = f"{module}.weight", (width,)
    if config.norm == "rms":
        plan.add(name, shape, dtype, CheckpointTensor(weight, shape, name))
    elif config.norm == "rms of 1 + w":
        plan.add(name, shape, torch.float32, CheckpointTensor(weight, shape, name, offset=1.0))
    else:
        scale = CheckpointTensor(weight, shape, name, index=(0,))
        shift = CheckpointTensor(f"{module}.bias", shape, name, index=(1,))
        plan.add(name, (2, width), dtype, scale, shift)


def _qkv(config: ModelConfig, prefix: str, param: str, inputs: tuple[int, ...]) -> Iterator[CheckpointTensor]:
    """Yield what fills the rows of all queries, all keys, all values, out of one tensor or three."""
    names, ending, whole, own = config.names, "weight" if inputs else "bias", config.whole, config.own
    counts = {"q": whole.num_heads, "k": whole.num_kv_heads, "v": whole.num_kv_heads}
    target = 0  # next row of the param
    for part, heads in counts.items():
        tensor = f"{prefix}{names.qkv or getattr(names, part)}.{ending}"
        shape = ((sum(counts.values()) if names.qkv else heads) * config.head_dim, *inputs)
        here = own.heads if part == "q" else own.kv_heads
        runs = [run for head in here for run in _head_rows(whole, part, head)]
        for rows in _joined(runs):
            is_all = len(rows) == shape[0] and rows.step == 1
            yield CheckpointTensor(tensor, shape, param, target, rows=None if is_all else rows)
            target += len(rows)


def _head_rows(config: ModelConfig, part: str, head: int) -> list[range]:
    """Return the rows of a head of the whole model in its tensor, in the order in which they are loaded."""
    number, width = head, config.head_dim
    if config.names.qkv and config.has_qkv_groups:
        group = config.num_heads // config.num_kv_heads
        of_kv, place = divmod(head, group) if part == "q" else (head, group + (part == "v"))
        number = of_kv * (group + 2) + place
    elif config.names.qkv:
        number += {"q": 0, "k": config.num_heads, "v": config.num_heads + config.num_kv_heads}[part]
    begin, end = number * width, (number + 1) * width
    if part == "v" or not config.has_rotary_pairs:
        return [range(begin, end)]
    turning = begin + config.rope.dim
    runs = [range(begin, turning, 2), range(begin + 1, turning, 2), range(turning, end)]
    return [rows for rows in runs if rows]


def _joined(runs: list[range]) -> list[range]:
    """Join runs that follow each other."""
    made: list[range] = []
    for run in runs:
        if made and run.step == made[-1].step == 1 and run.start == made[-1].stop:
            made[-1] = range(made[-1].start, run.stop)
        else:
            made.append(run)
    return made


def _feed_forward(
    config: ModelConfig, dtype: torch.dtype, layer: int, page_bytes: int, max_tp: int
) -> RangePlan:
    names, prefix = config.names, f"{config.names.layer}.{layer}."
    hidden, intermediate, own = config.hidden_size, config.intermediate_size, config.own
    here, all_rows = _some(own.ffn_rows, own.sizes.ffn_rows), own.sizes.ffn_rows
    units = full_units(intermediate, degrees(config, max_tp)[-1])
    unit = RangePlan(f"layer {layer} FFN")
    unit.add("gate_up", (config.num_ffn_matrices, units.size, hidden), dtype)
    unit.add("down", (units.size, hidden), dtype)
    if units.count == 1:
        plan = unit.repeated(1, unit.nbytes)
    elif units.is_even and units.size * hidden * dtype.itemsize % page_bytes == 0:
        plan = unit.side_by_side(units.count)
    else:
        plan = unit.repeated(units.count, -(-unit.nbytes // page_bytes) * page_bytes)
    plan.padding_bytes = plan.nbytes - (config.num_ffn_matrices + 1) * intermediate * hidden * dtype.itemsize
    plan.sources += [replace(source, units=units) for source in _gate_up(config, prefix)]
    down = CheckpointTensor(f"{prefix}{names.down}.weight", (hidden, all_rows), "down", is_transposed=True)
    plan.sources.append(replace(down, columns=here, units=units))
    if config.has_ffn_bias:
        up_bias = CheckpointTensor(f"{prefix}{names.up}.bias", (all_rows,), "up_bias", rows=here, units=units)
        plan.add("up_bias", (units.count, units.size), dtype, up_bias)
        if not own.rank.rank:
            _add_whole(plan, "down_bias", prefix + names.down, (hidden,), dtype)
    return plan


def _experts(
    config: ModelConfig, mixture: Mixture, dtype: torch.dtype, layer: int, page_bytes: int, max_tp: int
) -> RangePlan:
    names, prefix, count = config.names, f"{config.names.layer}.{layer}.", mixture.num_units
    hidden, width = config.hidden_size, config.intermediate_size
    expert = RangePlan(f"layer {layer} FFN")
    expert.add("gate_up", (config.num_ffn_matrices, width, hidden), dtype)
    expert.add("down", (hidden, width), dtype)
    if config.has_ffn_bias:
        expert.add("up_bias", (config.num_ffn_matrices, width), dtype)
        expert.add("down_bias", (hidden,), dtype)
    stride = pad_expert(config, mixture, expert.nbytes, page_bytes, max_tp)
    own, shared = config.own.experts, shared_units(mixture.num_experts, mixture.num_shared)
    plan = expert.repeated(len(own), stride)
    for e, unit in enumerate(unit for unit in range(count) if unit not in shared):
        if unit not in own:
            continue
        at = unit - own.start
        if names.experts_gate_up:
            plan.sources += _stacked(config, count, prefix, e, at)
            continue
        module = f"{prefix}{names.experts}.{e}."
        plan.sources += _gate_up(config, module, (at,))
        plan.sources.append(
            CheckpointTensor(f"{module}{names.down}.weight", (hidden, width), "down", index=(at,))
        )
    plan.sources += _shared(config, f"{prefix}{names.shared_expert}.", shared)
    plan.padding_bytes = len(own) * stride - sum(source.numel for source in plan.sources) * dtype.itemsize
    _add_router(plan, config, mixture, prefix, dtype)
    return plan


def _shared(config: ModelConfig, module: str, units: list[int]) -> Iterator[CheckpointTensor]:
    """Yield what fills the slices of a shared expert."""
    names, hidden, width, own = config.names, config.hidden_size, config.intermediate_size, config.own.experts
    for i, unit in enumerate(units):
        if unit not in own:
            continue
        of_unit, at = range(i * width, (i + 1) * width), unit - own.start
        for index, name in enumerate((names.gate, names.up)):
            shape = (len(units) * width, hidden)
            place = (at, index)
            yield CheckpointTensor(f"{module}{name}.weight", shape, "gate_up", index=place, rows=of_unit)
        shape = (hidden, len(units) * width)
        yield CheckpointTensor(f"{module}{names.down}.weight", shape, "down", index=(at,), columns=of_unit)


def _add_router(
    plan: RangePlan, config: ModelConfig, mixture: Mixture, prefix: str, dtype: torch.dtype
) -> None:
    names, count, hidden = config.names, mixture.num_experts, config.hidden_size
    rows = [CheckpointTensor(f"{prefix}{names.router}.weight", (count, hidden), "router")]
    if mixture.num_shared:
        gate = f"{prefix}{names.shared_gate}.weight"
        rows.append(CheckpointTensor(gate, (1, hidden), "router", row=count))
    plan.add("router", (count + bool(mixture.num_shared), hidden), dtype, *rows)
    if config.has_ffn_bias:
        shape = (count,)
        bias = CheckpointTensor(f"{prefix}{names.router}.bias", shape, "router_bias")
        plan.add("router_bias", shape, dtype, bias)


def _stacked(
    config: ModelConfig, count: int, prefix: str, expert: int, at: int
) -> Iterator[CheckpointTensor]:
    """Yield what fills place `at` with an expert out of tensors that stack all of them, with its biases."""
    names, hidden, width = config.names, config.hidden_size, config.intermediate_size
    gate_up, down = prefix + names.experts_gate_up, prefix + names.experts_down
    for index in (0, 1):
        place: dict[str, Any] = {
            "index": (at, index),
            "expert": expert,
            "columns": range(index, 2 * width, 2),
        }
        yield CheckpointTensor(gate_up, (count, hidden, 2 * width), "gate_up", is_transposed=True, **place)
        yield CheckpointTensor(f"{gate_up}_bias", (count, 2 * width), "up_bias", **place)
    place = {"index": (at,), "expert": expert}
    yield CheckpointTensor(down, (count, width, hidden), "down", is_transposed=True, **place)
    yield CheckpointTensor(f"{down}_bias", (count, hidden), "down_bias", **place)


def _gate_up(config: ModelConfig, prefix: str, expert: tuple[int, ...] = ()) -> Iterator[CheckpointTensor]:
    """Yield what fills the matrices that read the FFN's input, or an expert's, out of one tensor or two."""
    names, own = config.names, config.own
    size = own.sizes.ffn_rows
    if config.ffn == "plain":
        modules = [names.up]
    elif names.gate_up:
        shape = (2 * size, config.hidden_size)
        for index in (0, 1):
            rows = range(index * size + own.ffn_rows.start, index * size + own.ffn_rows.stop)
            yield CheckpointTensor(
                f"{prefix}{names.gate_up}.weight", shape, "gate_up", index=(*expert, index), rows=rows
            )
        return
    else:
        modules = [names.gate, names.up]
    for index, module in enumerate(modules):
        shape, rows_of = (size, config.hidden_size), _some(own.ffn_rows, size)
        index_of = (*expert, index)
        yield CheckpointTensor(f"{prefix}{module}.weight", shape, "gate_up", index=index_of, rows=rows_of)
