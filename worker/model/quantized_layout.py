"""The layout of a quantised half: pure arithmetic, as `layout` is for full precision.

The FFN is stored unit by unit. A unit is the shard of the largest tensor-parallel degree, so every shard of
any degree is a run of units and ends on a page, and no group straddles a shard. Rows are divided evenly among
units by whole groups, or by whole tiles (`worker.model.row_units.quantized_units`); all units have the room
of the largest. Norms and biases are small: they stay full and are
copied into their half's range, so that a half is one range in any variant.

::

    FFN range         unit 0 | unit 1 | ... | biases        each unit padded to whole pages
    unit              gate codes [Iu, H] | up codes [Iu, H] | their scales, zeros | down codes [H, Iu] | ...
    attention range   qkv codes [Hq*D + 2*Hkv*D, H] | scales, zeros | o codes [H, Hq*D] | ... | biases, norms

In a mixture of experts a unit is an expert; units lie as in `layout`, and the router stays full behind them.

Codes are `kernels.packing`'s; scales are float16 and zeros uint8, one for each group of inputs. With
activation-aware scales, `input_scale` float32 is beside each product's zeros (each unit's gate and up have
their own). o stays dense if a head shard of the largest degree is not a whole number of tiles.

With activation-ordered groups (GPTQ's desc_act) columns lie in the order of their groups, and `input_order`
int32 says which input each is of. down needs none: its order is that of the rows of gate and up. The order of
o's inputs goes across heads, so o stays dense where a rank takes its heads' columns out of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from bus.precisions import BITS, ENTRIES, Precision
from kernels.packing import TILE, packed_size
from kernels.quantized import GROUP_STEP
from worker.model.config import ModelConfig
from worker.model.cut import heads_of
from worker.model.layout import ModelPlan, RangePlan, degrees, pad_expert
from worker.model.row_units import quantized_units, unit_group
from worker.model.shard import Shard


def plan_quantized(
    config: ModelConfig,
    plan: ModelPlan,
    page_bytes: int,
    precision: Precision,
    *,
    group: int | None = None,
    has_input_scale: bool = False,
    has_input_order: bool = False,
    has_whole_groups: bool = False,
) -> tuple[RangePlan, RangePlan]:
    """Lay out (attention, FFN) of any layer in fewer bits; the layers are alike.

    group: inputs that share a scale in the weights; if a unit needs finer groups, its groups have the largest
    size that divides both. has_whole_groups: groups of a fixed degree's rank begin where those of the whole
    matrix do. Raises ValueError unless it is a multiple of 32.
    """
    group = ENTRIES[precision].group if group is None else group
    if group < 1 or group % GROUP_STEP:
        raise ValueError(f"the group is {group}; it must be a multiple of {GROUP_STEP}")
    units = degrees(config, plan.max_tp)[-1]
    own, starts = config.own, dict[str, int]()
    if has_whole_groups:
        starts = {"o": own.heads.start * config.head_dim, "down": own.ffn_rows.start}
    product = _Products(BITS[precision], group, has_input_scale, has_input_order, starts)
    return (
        _attention(config, plan, units, product, f"attention {precision}"),
        _feed_forward(config, plan, units, page_bytes, product, f"FFN {precision}"),
    )


class _Products:
    """Adds quantised matrices to a plan."""

    def __init__(
        self,
        bits: int,
        group: int,
        has_input_scale: bool,
        has_input_order: bool,
        starts: Mapping[str, int],
    ) -> None:
        """Set the form of all. starts: of a matrix, the first input in a whole one with its groups."""
        self._bits, self.group, self._starts = bits, group, starts
        self._has_input_scale, self.has_input_order = has_input_scale, has_input_order

    def add(self, plan: RangePlan, name: str, outputs: int, inputs: int, run: int = 0) -> None:
        """Add a matrix whose inputs can be cut into runs of this size; 0: they are not cut."""
        group = math.gcd(self.group, inputs, run, self._starts.get(name, 0))
        plan.add(f"{name}.codes", (outputs, packed_size(inputs, self._bits)), torch.uint8)
        plan.add(f"{name}.scales", (outputs, inputs // group), torch.float16)
        plan.add(f"{name}.zeros", (outputs, inputs // group), torch.uint8)
        if self._has_input_scale:
            plan.add(f"{name}.input_scale", (inputs,), torch.float32)
        if self.has_input_order and name != "down":
            plan.add(f"{name}.input_order", (inputs,), torch.int32)


def _attention(config: ModelConfig, full: ModelPlan, units: int, products: _Products, name: str) -> RangePlan:
    plan = RangePlan(name)
    products.add(plan, "qkv", config.q_size + 2 * config.kv_size, whole_tiles(config.hidden_size))
    # A rank takes its heads' columns out of o: they must begin and end with a tile, and with a group.
    is_whole = units == 1 and config.cut is None
    own, bounds = config.own.heads, _bounds(config, units)
    ends = [*bounds, own.start * config.head_dim, own.stop * config.head_dim]
    if is_whole or (not any(end % TILE for end in ends) and not products.has_input_order):
        inputs = whole_tiles(config.q_size)
        products.add(plan, "o", config.hidden_size, inputs, inputs if units == 1 else math.gcd(*bounds))
    kept, _ = full.layers[0]
    for name, param in kept.params.items():
        if name != "qkv" and f"{name}.codes" not in plan.params:
            plan.add(name, param.shape, param.dtype)
    return plan


def _bounds(config: ModelConfig, units: int) -> list[int]:
    """Return where the columns of o end that each of `units` ranks takes; those of fewer ranks do so, too."""
    shards = (Shard(rank, units) for rank in range(units))
    heads = (heads_of(config.num_heads, config.num_kv_heads, shard)[0] for shard in shards)
    return [each.stop * config.head_dim for each in heads]


def _feed_forward(
    config: ModelConfig, full: ModelPlan, units: int, page_bytes: int, products: _Products, name: str
) -> RangePlan:
    mixture = config.mixture
    rows = quantized_units(config.intermediate_size, 1 if mixture else units, products.group)
    unit_inputs = whole_tiles(rows.size)
    unit = RangePlan(name)
    products.add(unit, "gate_up", config.num_ffn_matrices * unit_inputs, whole_tiles(config.hidden_size))
    products.add(unit, "down", config.hidden_size, unit_inputs, unit_group(rows, products.group))
    if mixture:
        if config.has_ffn_bias:
            unit.add("up_bias", (config.num_ffn_matrices, unit_inputs), full.dtype)
            unit.add("down_bias", (config.hidden_size,), full.dtype)
        stride = pad_expert(config, mixture, unit.nbytes, page_bytes, full.max_tp)
        plan = unit.repeated(len(config.own.experts), stride)
        for name, param in full.layers[0][1].params.items():
            if param.split is None:  # the router and its bias
                plan.add(name, param.shape, param.dtype)
        return plan
    plan = unit.repeated(units, -(-unit.nbytes // page_bytes) * page_bytes)
    if config.has_ffn_bias:  # every rank has both whole
        _, kept = full.layers[0]
        plan.add("up_bias", (units, unit_inputs), kept.params["up_bias"].dtype)
        if "down_bias" in kept.params:  # of a fixed degree's ranks the first has it
            plan.add("down_bias", (config.hidden_size,), kept.params["down_bias"].dtype)
    return plan


def whole_tiles(inputs: int) -> int:
    """Round up to the tiles that codes are packed in."""
    return -(-inputs // TILE) * TILE
