"""The contents of host images: each variant's bytes as they lie in its range.

Full precision is copied out of the loaded ranges. A quantised half is arranged from packed matrices
(`QuantizedMatrix`: made by `instar quantize`, or rounded here from the loaded weights) into the units of
`worker.model.quantized_layout`. Groups larger than a unit allows are split: their scales are repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from safetensors import safe_open

from bus.messages import PARTS, Part
from bus.precisions import BITS, ENTRIES, Precision
from kernels.quantized import GROUP_STEP
from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.cut import Cut
from worker.model.layout import ModelPlan, RangePlan
from worker.model.quantized_layout import plan_quantized, whole_tiles
from worker.model.quantized_sets import (
    INPUTS,
    QuantizedMatrix,
    QuantizedSet,
    find_set,
    matrices_by_input,
    matrix_name,
    matrix_shapes,
    round_to_nearest,
    set_path,
)
from worker.model.ready_weights import QuantizedCheckpoint
from worker.model.row_units import RowUnits, full_units, quantized_units
from worker.model.sources import CheckpointWeights, WeightSource, checkpoint_digest
from worker.model.weights import Tensors, tensors_in
from worker.shape.copier import Pause, lay_out

# Elements that are rounded at a time. On a CPU temporaries then stay in caches (measured on two cores: 8 ns
# an element; with 2^24 at a time 20). On a GPU each piece costs 48 launches and two waits.
_ROUNDED_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 22}


class MatrixSource(Protocol):
    """A source of the quantised matrices of one variant."""

    name: str  # identifies the source and its contents
    method: str
    group: int
    has_input_scale: bool
    has_input_order: bool
    is_whole: bool  # what it reads are the matrices of all ranks of a fixed degree

    def read(self, layer: int, product: str, full: Tensors, pause: Pause) -> list[QuantizedMatrix]:
        """Read the matrices of one of `INPUTS`, in its order. full: the half's tensors in full precision."""


class SetMatrices:
    """Matrices of a set that `instar quantize` made."""

    is_whole = True

    def __init__(self, config: ModelConfig, stored: QuantizedSet) -> None:
        self._config, self._stored = config, stored
        with safe_open(stored.path, framework="pt") as file:
            contents = sorted((file.metadata() or {}).items())  # checksums of all matrices among them
            tensors: list[str] = list(file.keys())
            self.has_input_scale = any(tensor.endswith(".input_scale") for tensor in tensors)
            self.has_input_order = any(tensor.endswith(".input_order") for tensor in tensors)
        self.method, self.group = stored.info.method, stored.info.group
        self.name = f"{stored.path.name} {hashlib.sha256(repr(contents).encode()).hexdigest()}"

    def read(self, layer: int, product: str, full: Tensors, pause: Pause) -> list[QuantizedMatrix]:
        shapes, made = matrix_shapes(self._config), []
        for name in matrices_by_input(self._config)[product]:
            stored = matrix_name(self._config.first_layer + layer, name)
            made.append(self._stored.matrix(stored, shapes[name], pause))
        return made


class ReadyMatrices:
    """Matrices of a checkpoint that is quantised itself."""

    has_input_scale = False
    is_whole = True

    def __init__(self, config: ModelConfig, checkpoint: QuantizedCheckpoint) -> None:
        self._config, self._checkpoint = config, checkpoint
        self.method: str = checkpoint.form.method
        self.group = checkpoint.group
        self.has_input_order = checkpoint.form.is_ordered
        self.name = f"{checkpoint.form} of the checkpoint"

    def read(self, layer: int, product: str, full: Tensors, pause: Pause) -> list[QuantizedMatrix]:
        names = (matrix_name(self._config.first_layer + layer, name) for name in INPUTS[product])
        return [self._checkpoint.matrix(name, pause) for name in names]


class RoundedMatrices:
    """The loaded weights, rounded to nearest."""

    is_whole = False

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        self._config, self._bits = config, BITS[precision]
        self.method, self.group = "rtn", ENTRIES[precision].group
        self.has_input_scale = self.has_input_order = False
        self.name = f"rounded to {self._bits} bits in groups of {self.group}"

    def read(self, layer: int, product: str, full: Tensors, pause: Pause) -> list[QuantizedMatrix]:
        return [self._round(matrix, pause) for matrix in dense_matrices(self._config, product, full)]

    def _round(self, matrix: torch.Tensor, pause: Pause) -> QuantizedMatrix:
        rows = max(1, _ROUNDED_ELEMENTS[matrix.device.type] // matrix.shape[1])
        made = []
        for part in matrix.split(rows):
            made.append(round_to_nearest(part, self._bits, self.group))
            pause()
        return QuantizedMatrix(
            codes=torch.cat([part.codes for part in made]),
            scales=torch.cat([part.scales for part in made]),
            zeros=torch.cat([part.zeros for part in made]),
            input_scale=None,
            bits=self._bits,
            group=self.group,
            num_inputs=matrix.shape[1],
        )


def dense_matrices(config: ModelConfig, product: str, full: Tensors) -> list[torch.Tensor]:
    """Return the matrices [N, K] of one of `INPUTS`, in its order, out of a half in full precision."""
    if product == "gate_up" and config.mixture:
        return list(full["gate_up"])
    if product == "down" and config.mixture:
        return [full["down"]]
    if product in ("gate_up", "down"):
        units = full_units(config.intermediate_size, full["down"].shape[0])
        if product == "down":
            return [units.joined(full["down"]).T]
        return [units.joined(matrix) for matrix in full["gate_up"].unbind(1)]
    if product == "qkv":
        return list(full["qkv"].split([config.q_size, config.kv_size, config.kv_size]))
    return [full["o"]]


def find_matrices(
    config: ModelConfig, source: WeightSource, precision: Precision, method: str
) -> MatrixSource:
    """Open the quantised set in the model's folder, or round the loaded weights to nearest without one.

    method: "awq", "gptq", "rtn", or "" for the best set there is. Raises ModelError for a set that is
    damaged, of another model, or asked for and missing.
    """
    if isinstance(source, QuantizedCheckpoint):
        if precision != config.fixed_precision:
            raise ModelError(
                f"{config.folder}: the checkpoint has its layers in {config.fixed_precision} alone, not in"
                f" {precision}"
            )
        return ReadyMatrices(config, source)
    if config.mixture:
        if method not in ("", "rtn"):
            raise ModelError(
                f"{config.folder}: worker.quantization is {method!r}, and experts are only rounded to"
                ' nearest; leave it empty, or make it "rtn"'
            )
        return RoundedMatrices(config, precision)
    if isinstance(source, CheckpointWeights):
        if path := find_set(config.folder, precision, method):
            whole = read_config(config.folder)
            return SetMatrices(config, QuantizedSet(path, model=checkpoint_digest(whole, source)))
        if method not in ("", "rtn"):
            raise ModelError(
                f"{set_path(config.folder, precision, method)} is missing and worker.quantization is"
                f" {method!r}; make it with `instar quantize {config.folder} --method {method} --bits"
                f" {BITS[precision]}`, or leave the method empty"
            )
    return RoundedMatrices(config, precision)


def plan_variants(
    config: ModelConfig, plan: ModelPlan, page_bytes: int, matrices: Mapping[Precision, MatrixSource]
) -> dict[tuple[Part, Precision], RangePlan]:
    """Lay out the halves of any layer in each precision below full; the layers are alike."""
    made: dict[tuple[Part, Precision], RangePlan] = {}
    for precision, source in matrices.items():
        first_row = config.own.ffn_rows.start
        if source.is_whole and first_row % GROUP_STEP:
            raise ModelError(
                f"{config.folder}: {source.name} cannot be cut for {config.own.rank.size} ranks: a part of"
                f" the FFN would begin with row {first_row}, which is no multiple of {GROUP_STEP}"
            )
        halves = plan_quantized(
            config,
            plan,
            page_bytes,
            precision,
            group=source.group,
            has_input_scale=source.has_input_scale,
            has_input_order=source.has_input_order,
            has_whole_groups=source.is_whole,
        )
        made |= {(part, precision): half for part, half in zip(PARTS, halves, strict=True)}
    return made


def write_half(
    config: ModelConfig,
    target: Tensors,
    matrices: MatrixSource,
    layer: int,
    full: Tensors,
    pause: Pause = lambda: None,
) -> None:
    """Fill the views of a quantised half, which hold zeros."""
    products = [product for product in INPUTS if f"{product}.codes" in target]
    count = 1 if config.mixture or "down.codes" not in target else target["down.codes"].shape[0]
    units = quantized_units(config.intermediate_size, count, matrices.group)
    for part, whole in zip(_experts_of(target), _experts_of(full), strict=True):
        rows: torch.Tensor | None = None  # the order of down's inputs, which gate and up make
        for product in reversed(products):
            made = matrices.read(layer, product, whole, pause)
            if product == "down":
                rows = made[0].input_order
            elif product == "gate_up" and rows is not None:
                made = [matrix.with_outputs(rows) for matrix in made]
            if matrices.is_whole and config.cut:
                made = list(_own_parts(product, made, config.cut))
            _write_product(part, product, made, units)
            pause()
    for name, kept in target.items():
        if name == "up_bias" and not config.mixture:
            of_full = full_units(config.intermediate_size, full[name].shape[0])
            units.spread(of_full.joined(full[name]), kept)
        elif name.partition(".")[0] not in products:
            kept[..., : full[name].shape[-1]].copy_(full[name])  # the bias of experts is padded


def _own_parts(product: str, whole: Sequence[QuantizedMatrix], cut: Cut) -> Iterator[QuantizedMatrix]:
    """Yield what a rank has of the matrices of a product."""
    size = whole[0].codes.shape[0] // cut.sizes.heads if product == "qkv" else 0  # of a head
    heads = (cut.heads, cut.kv_heads, cut.kv_heads)
    for number, matrix in enumerate(whole):
        if product == "qkv":
            yield matrix.outputs(range(heads[number].start * size, heads[number].stop * size))
        elif product == "o":
            size = matrix.num_inputs // cut.sizes.heads
            yield matrix.inputs(range(cut.heads.start * size, cut.heads.stop * size))
        elif product == "gate_up":
            yield matrix.outputs(cut.ffn_rows)
        else:
            yield matrix.inputs(cut.ffn_rows)


def _experts_of(half: Tensors) -> Iterator[Tensors]:
    """Yield the tensors of each expert; of another half, the tensors as they are."""
    if "router" not in half:
        yield half
        return
    experts = {name: part for name, part in half.items() if not name.startswith("router")}
    for each in zip(*experts.values(), strict=True):
        yield dict(zip(experts, each, strict=True))


def _write_product(
    target: Tensors, product: str, matrices: Sequence[QuantizedMatrix], ffn_units: RowUnits
) -> None:
    """Write the matrices of a product; the rows of an FFN, which are inputs of down, lie in `ffn_units`."""
    packed = target[f"{product}.codes"]
    unit_inputs = packed.shape[-1] * 8 // matrices[0].bits
    for ending in ("codes", "scales", "zeros"):
        stored = target[f"{product}.{ending}"]
        stored = stored if stored.dim() == 3 else stored[None]
        parts = [matrix.tensors()[ending] for matrix in matrices]
        if ending != "codes":
            parts = [
                part.repeat_interleave(matrices[0].group * stored.shape[2] // unit_inputs, 1)
                for part in parts
            ]
        if product == "down":
            _write_inputs(stored, parts[0], ffn_units, unit_inputs)
        elif product == "gate_up":
            room = stored.shape[1] // len(parts)
            for i, part in enumerate(parts):
                columns = min(stored.shape[2], part.shape[1])
                ffn_units.spread(part[:, :columns], stored[:, i * room : (i + 1) * room, :columns])
        else:
            whole = torch.cat(parts)[:, : stored.shape[2]]
            stored[0, :, : whole.shape[1]].copy_(whole)
    order, scale = matrices[0].input_order, matrices[0].input_scale
    if f"{product}.input_scale" in target:
        in_order = scale if scale is None or order is None else scale[order.long()]
        _write_input_scale(target[f"{product}.input_scale"], product, in_order, ffn_units)
    if f"{product}.input_order" in target:
        _write_input_order(target[f"{product}.input_order"], order)


def _write_inputs(stored: torch.Tensor, whole: torch.Tensor, units: RowUnits, unit_inputs: int) -> None:
    """Write the columns of whole [N, codes or groups] that each unit of [U, N, room] has the inputs of."""
    for unit, rows in zip(stored, units, strict=True):
        begin, end = (-(-at * stored.shape[2] // unit_inputs) for at in (rows.start, whole_tiles(rows.stop)))
        part = whole[:, begin : min(end, begin + stored.shape[2])]
        unit[:, : part.shape[1]].copy_(part)


def _write_input_scale(
    target: torch.Tensor, product: str, input_scale: torch.Tensor | None, ffn_units: RowUnits
) -> None:
    """Write [K], or [U, K] if each unit has the scales of its own inputs."""
    target.fill_(1.0)
    if input_scale is None:
        return
    if product == "down":
        ffn_units.spread(input_scale, target if target.dim() == 2 else target[None])
    else:
        target[..., : len(input_scale)] = input_scale.to(target.device)


def _write_input_order(target: torch.Tensor, order: torch.Tensor | None) -> None:
    """Write [K], or [U, K]; what the weight does not order, such as padding, keeps its place."""
    target.copy_(torch.arange(target.shape[-1], dtype=torch.int32).expand_as(target))
    if order is not None:
        target[..., : len(order)] = order.to(target.device)


def kept_tensors(
    plan: RangePlan,
    quantized: RangePlan,
    matrices: MatrixSource,
    source: WeightSource,
    device: torch.device,
    pause: Pause,
) -> Tensors:
    """Read those tensors of a half that `write_half` needs and that are not in `matrices` already."""
    if isinstance(matrices, ReadyMatrices):
        kept = [each for each in plan.sources if f"{each.param}.codes" not in quantized.params]
        plan = replace(plan, sources=kept)
    return tensors_in(lay_out(plan, source, device, pause), plan)
