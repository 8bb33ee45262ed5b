"""A model of one decode step on a GPU: its launches, bytes and operations, and the time that follows.

A launch takes the longer of the times for its bytes and for its operations, at the peaks of the device, and a
fixed time to begin and to end. The host takes a fixed time for each launch, beside the device, and for the
rest of the step. So a step is

    step_s + max(sum of launches on the device, launches * host time of one)

which is the roofline of each launch (Williams et al., Roofline, 2009, section 3) with two fixed costs. Pure:
no GPU, no torch. `python -m bench.gpu model` prints it beside what was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from bus.precisions import ENTRIES, Precision

CODES_OF_GROUP: Final = 3  # bytes beside the codes of a group: a float16 scale and a uint8 zero
ROW_TILE: Final = 16  # the fewest rows that tensor cores multiply
PARTS_OF_LAYER: Final = 2  # its halves, recorded one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """The peaks of a device, and the fixed costs of a launch and of a step.

    kernel_s: of a launch on the device beyond its bytes or operations. launch_s, graph_s: of the host for a
    launch, and for one of a recorded part. step_s: of the host beside launches: schedule, stage, publish.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float  # bfloat16, dense
    kernel_s: float
    launch_s: float
    graph_s: float
    step_s: float

    def measured(self, bytes_per_s: float, flops_per_s: float) -> Self:
        """Return the device with the peaks that a run of `bench.gpu card` reached."""
        return replace(self, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)


# Bytes and operations: NVIDIA's data sheets of the SXM cards. launch_s: of the first run on an H200, in which
# a step of one sequence took 16.0 ms for 357 launches (bench/LOG.md). The other three are assumptions, until
# runs say otherwise: 3 us for a kernel to fill and drain the device, 6 us for the launch of a graph, half a
# millisecond for the rest of the step.
COSTS: Final[Mapping[str, float]] = {"kernel_s": 3e-6, "launch_s": 43e-6, "graph_s": 6e-6, "step_s": 5e-4}
DEVICES: Final = (
    DevicePeaks(name="H100", bytes_per_s=3.35e12, flops_per_s=989e12, **COSTS),
    DevicePeaks(name="H200", bytes_per_s=4.8e12, flops_per_s=989e12, **COSTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """A model with one FFN in each layer, held in a dtype of `dtype_bytes`."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    dtype_bytes: int = 2

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the shape of a config.json."""
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocabulary=config["vocab_size"],
        )

    @property
    def num_queries(self) -> int:
        """Numbers of a token's queries, of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_keys(self) -> int:
        """Numbers of a token's keys, of all KV heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, or `count` that are alike: the bytes of the device's memory and the operations of each."""

    name: str
    nbytes: float = 0.0
    flops: float = 0.0
    count: int = 1

    def seconds_by(self, device: DevicePeaks) -> dict[str, float]:
        """Return the time of all of them on the device, by what it is spent on."""
        by_bytes, by_operations = self.nbytes / device.bytes_per_s, self.flops / device.flops_per_s
        work = "bytes" if by_bytes >= by_operations else "operations"
        return {work: self.count * max(by_bytes, by_operations), "kernels": self.count * device.kernel_s}


def decode_launches(
    shape: StepShape, num_seqs: int, context: float, precision: Precision = "full"
) -> Iterator[Launch]:
    """Yield the launches of a step in which `num_seqs` sequences of `context` tokens decode.

    precision: of the layers; embedding and head stay in full. Quantised products read codes alone, at every
    number of rows. Activations but the logits stay in the second-level cache: of 256 sequences they take 15
    MB at most.
    """
    s, rows, layers = shape, num_seqs, shape.num_layers

    def product(name: str, inputs: int, outputs: int, each: float, count: int) -> Launch:
        return Launch(name, inputs * outputs * each, 2.0 * max(rows, ROW_TILE) * inputs * outputs, count)

    of_layer, queries = weight_bytes(precision, s.dtype_bytes), s.num_queries
    token_bytes = 2 * s.num_keys * s.dtype_bytes  # keys and values of a token in a layer
    query_rows = s.num_kv_heads * max(ROW_TILE, s.num_heads // s.num_kv_heads)
    yield Launch("embed", rows * s.hidden * s.dtype_bytes)
    yield Launch("norm", count=2 * layers + 1)
    yield product("qkv", s.hidden, queries + 2 * s.num_keys, of_layer, layers)
    yield Launch("rotary_store_kv", rows * token_bytes, count=layers)
    yield Launch(
        "attention", rows * context * token_bytes, 4.0 * rows * context * query_rows * s.head_dim, layers
    )
    yield Launch("join", count=layers)
    yield product("o", queries, s.hidden, of_layer, layers)
    yield product("gate_up", s.hidden, 2 * s.intermediate, of_layer, layers)
    yield Launch("mix", count=layers)
    yield product("down", s.intermediate, s.hidden, of_layer, layers)
    yield product("head", s.hidden, s.vocabulary, float(s.dtype_bytes), 1)
    # Logits are written in the model's dtype, read, written in float32, and read for the largest of each row.
    yield Launch("to_float32", rows * s.vocabulary * (2.0 * s.dtype_bytes + 4))
    yield Launch("largest", rows * s.vocabulary * 4.0)


def weight_bytes(precision: Precision, dtype_bytes: int = 2) -> float:
    """Return the bytes of one weight: its code, and its part of the group's scale and zero."""
    entry = ENTRIES[precision]
    return entry.bits / 8 + CODES_OF_GROUP / entry.group if entry.bits else float(dtype_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """The times of a step, and what they come from."""

    num_seqs: int
    context: float
    precision: Precision
    launches: int
    parts: int  # recorded parts, each of which is one launch: two of a layer, and what surrounds them
    nbytes: float
    flops: float
    device_s: float
    eager_s: float  # the whole step, launch by launch
    graphs_s: float  # the whole step, with recorded parts
    bound_by: str  # of the eager step: "host", or the kind of work that takes most of the device's time


def predict(
    device: DevicePeaks, shape: StepShape, num_seqs: int, context: float, precision: Precision = "full"
) -> StepPrediction:
    """Return the times of a step of `num_seqs` sequences of `context` tokens each."""
    launches = list(decode_launches(shape, num_seqs, context, precision))
    num_launches = sum(one.count for one in launches)
    by_work: Counter[str] = Counter()
    for one in launches:
        by_work.update(one.seconds_by(device))
    device_s, host_s = by_work.total(), num_launches * device.launch_s
    parts = PARTS_OF_LAYER * shape.num_layers + 2
    return StepPrediction(
        num_seqs=num_seqs,
        context=context,
        precision=precision,
        launches=num_launches,
        parts=parts,
        nbytes=sum(one.count * one.nbytes for one in launches),
        flops=sum(one.count * one.flops for one in launches),
        device_s=device_s,
        eager_s=device.step_s + max(device_s, host_s),
        graphs_s=device.step_s + max(device_s, parts * device.graph_s),
        bound_by="host" if host_s > device_s else by_work.most_common(1)[0][0],
    )
