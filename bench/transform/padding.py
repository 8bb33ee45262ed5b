"""The cost of ending every FFN shard of every degree on a page, for models of known sizes.

    python -m bench.transform padding

First, a tensor's size in CUDA's pages of 2 MiB in bfloat16, alone and split in four: where that is no whole
number, unmapping cannot give back what the other ranks hold (Gyges, Table 3: the four models marked with *;
experts of one layer count as one matrix there). Beside it, what the engine's padding (`worker.model.layout`)
adds to the FFN and to all weights, where weights are laid out for degrees up to 2, 4 and 8. Bar: the 0 to
14 % of the paper, which are for degrees up to 4.

Then, laid out for the largest of these degrees, in bfloat16 and in int4: the rows that a rank multiplies,
beyond an equal share of the real ones, and what they add to the bytes that a step of one token reads. Bar:
1 % of these bytes at every degree in bfloat16. A degree that does not divide the KV heads is left out.

Biases, sinks and norms are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait
from bench.common.results import bar, conclude, say, say_bars
from bus.precisions import BITS, ENTRIES, Precision

# isort: split
import torch

from worker.model.config import Mixture, ModelConfig, Rope
from worker.model.layout import ModelPlan, degrees, plan_model
from worker.model.quantized_layout import plan_quantized
from worker.model.row_units import RowUnits, full_units, quantized_units

PAGE_BYTES = 2 << 20
DTYPE = torch.bfloat16
MAX_DEGREES = (2, 4, 8)  # that weights are laid out for
PRECISIONS: tuple[Precision, ...] = ("full", "int4")
MEMORY_BAR, STEP_BAR = 0.14, 0.01


@dataclass(frozen=True, slots=True)
class PaddingSizes:
    """The sizes in a model's config.json."""

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    num_experts: int = 0
    top_k: int = 0
    is_in_paper: bool = False

    def config(self) -> ModelConfig:
        mixture = Mixture(num_experts=self.num_experts, top_k=self.top_k, is_normalised=True)
        return ModelConfig(
            folder=Path(self.name),
            architecture="",
            dtype=DTYPE,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=1e-5,
            max_position_embeddings=1,
            has_tied_embeddings=False,
            has_qkv_bias=False,
            has_o_bias=False,
            has_qk_norm=False,
            sliding_windows=(0,) * self.num_layers,
            rope=Rope("default", (), 1.0),
            mixture=mixture if self.num_experts else None,
        )

    def units(self, max_tp: int, precision: Precision) -> RowUnits:
        """Return how the rows of an FFN, not of experts, are divided if it is laid out for `max_tp`."""
        count = degrees(self.config(), max_tp)[-1]
        if precision == "full":
            return full_units(self.intermediate, count)
        return quantized_units(self.intermediate, count, ENTRIES[precision].group)


MODELS = (
    PaddingSizes("GPT-OSS-120B", 2880, 2880, 36, 64, 8, 64, 201088, 128, 4, is_in_paper=True),
    PaddingSizes("GPT-OSS-20B", 2880, 2880, 24, 64, 8, 64, 201088, 32, 4, is_in_paper=True),
    PaddingSizes("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256, is_in_paper=True),
    PaddingSizes("Qwen2.5-32B", 5120, 27648, 64, 40, 8, 128, 152064, is_in_paper=True),
    PaddingSizes("Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936),
    PaddingSizes("Qwen3-30B-A3B", 2048, 768, 48, 32, 4, 128, 151936, 128, 8),
    PaddingSizes("Mixtral-8x7B", 4096, 14336, 32, 32, 8, 128, 32000, 8, 2),
    PaddingSizes("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151936),
    PaddingSizes("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 128, 152064),
    PaddingSizes("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256),
    PaddingSizes("Llama-2-7B", 4096, 11008, 32, 32, 32, 128, 32000),
    PaddingSizes("Llama-2-13B", 5120, 13824, 40, 40, 40, 128, 32000),
    PaddingSizes("Llama-2-70B", 8192, 28672, 80, 64, 8, 128, 32000),
)


def pages_per_tensor(model: PaddingSizes, tp: int) -> list[float]:
    """Return the pages of one shard of a matrix; for a mixture also of `gate` and `up`, stored as one."""
    rows = model.intermediate * max(1, model.num_experts)
    pages = model.hidden * rows * DTYPE.itemsize / PAGE_BYTES / tp
    return [pages, 2 * pages] if model.num_experts else [pages]


@cache
def planned(model: PaddingSizes, max_tp: int) -> ModelPlan:
    """Return the layout of the model, of one layer only: they are alike."""
    config = replace(model.config(), num_layers=1, sliding_windows=(0,))
    return plan_model(config, DTYPE, PAGE_BYTES, max_tp)


def ffn_overhead(model: PaddingSizes, max_tp: int, precision: Precision = "full") -> float:
    """Return the share that padding adds to an FFN, in bytes, for shards of every degree up to max_tp."""
    plan = planned(model, max_tp)
    stored = plan.layers[0][1]
    if precision != "full":
        _, stored = plan_quantized(model.config(), plan, PAGE_BYTES, precision)
    router = model.num_experts * model.hidden * DTYPE.itemsize
    return float((stored.nbytes - router) / _ffn_bytes(model, precision) - 1)


def model_overhead(model: PaddingSizes, max_tp: int) -> float:
    """Return the share that padding adds to all weights in full precision."""
    plan = planned(model, max_tp)
    ends = (plan.embedding, plan.head)
    elements = sum(source.numel for end in ends if end for source in end.sources)
    of_layer = sum(source.numel for half in plan.layers[0] for source in half.sources)
    padding = plan.layers[0][1].padding_bytes * model.num_layers
    return float(padding / ((elements + of_layer * model.num_layers) * DTYPE.itemsize))


def rows_beyond_share(model: PaddingSizes, max_tp: int, precision: Precision = "full") -> float:
    """Return the share by which what a rank multiplies exceeds an equal part of the rows, at any degree."""
    if model.num_experts:
        return 0.0  # a rank has as many whole experts as any other, and they have all rows
    units = model.units(max_tp, precision)
    return units.size * units.count / model.intermediate - 1


def largest_difference(model: PaddingSizes, max_tp: int, tp: int, precision: Precision = "full") -> int:
    """Return the rows by which two ranks of `tp` differ."""
    if model.num_experts:
        return 0
    units = model.units(max_tp, precision)
    each = units.count // tp
    rows = [sum(len(units.rows(rank * each + i)) for i in range(each)) for rank in range(tp)]
    return max(rows) - min(rows)


def step_overhead(model: PaddingSizes, max_tp: int, tp: int, precision: Precision = "full") -> float:
    """Return what the rows beyond an equal share add to the bytes that a rank reads for one token."""
    config = model.config()
    bits = _weight_bits(precision)
    q_size, kv_size = config.q_size, config.kv_size
    attention = (2 * q_size + 2 * kv_size) * model.hidden * bits / 8 / tp
    used = model.top_k / model.num_experts if model.num_experts else 1.0
    ffn = _ffn_bytes(model, precision) * used / tp
    head = model.vocabulary * model.hidden * DTYPE.itemsize  # whole on every rank
    extra = ffn * rows_beyond_share(model, max_tp, precision)
    return float(extra * model.num_layers / ((attention + ffn) * model.num_layers + head))


def _ffn_bytes(model: PaddingSizes, precision: Precision) -> float:
    """Return the bytes of a layer's FFN without padding, and without its router."""
    weights = 3 * model.hidden * model.intermediate * max(1, model.num_experts)
    return weights * _weight_bits(precision) / 8


def _weight_bits(precision: Precision) -> float:
    """Return the bits of a weight; a group has a float16 scale and a zero of a byte."""
    return 8 * DTYPE.itemsize if precision == "full" else BITS[precision] + 24 / ENTRIES[precision].group


def rows() -> Iterator[dict[str, Any]]:
    for model in MODELS:
        laid_out = degrees(model.config(), MAX_DEGREES[-1])
        most = laid_out[-1]
        yield {
            "model": model.name,
            "is_in_paper": model.is_in_paper,
            "pages_per_tensor": {f"TP{tp}": pages_per_tensor(model, tp) for tp in (1, 4)},
            "ffn_overhead": {
                name: {tp: round(ffn_overhead(model, tp, name), 4) for tp in MAX_DEGREES if tp in laid_out}
                for name in PRECISIONS
            },
            "model_overhead": {
                tp: round(model_overhead(model, tp), 4) for tp in MAX_DEGREES if tp in laid_out
            },
            "rows_between_ranks": {
                name: {tp: largest_difference(model, most, tp, name) for tp in laid_out}
                for name in PRECISIONS
            },
            "rows_beyond_share": {
                name: round(rows_beyond_share(model, most, name), 4) for name in PRECISIONS
            },
            "step_overhead": {
                name: {tp: round(step_overhead(model, most, tp, name), 4) for tp in laid_out}
                for name in PRECISIONS
            },
        }


def main() -> int:
    table = list(rows())
    memory = max(max(row["ffn_overhead"]["full"].values()) for row in table)
    step = max(max(row["step_overhead"]["full"].values()) for row in table)
    bars = {
        f"most that padding adds to an FFN, degrees up to {MAX_DEGREES[-1]}": bar(
            MEMORY_BAR, memory, memory <= MEMORY_BAR
        ),
        "most that padding adds to the bytes of a step, at any degree": bar(STEP_BAR, step, step <= STEP_BAR),
    }
    found = {"bench": "padding", "page_bytes": PAGE_BYTES, "models": table, "bars": bars}
    _say_card(table)
    say_bars(bars)
    return conclude(found, is_kept=True, bars=bars)


def _say_card(table: list[dict[str, Any]]) -> None:
    say(f"{'':<16}{'pages per tensor':<38}{'added to FFN (weights), for degrees up to'}")
    say(f"{'':<16}{'TP1':<18}{'TP4':<20}" + "".join(f"{tp:<18}" for tp in MAX_DEGREES) + "8 in int4")
    for row in table:
        pages = [" / ".join(f"{n:.9g}" for n in row["pages_per_tensor"][tp]) for tp in ("TP1", "TP4")]
        full, few = (row["ffn_overhead"][name] for name in PRECISIONS)
        whole = row["model_overhead"]
        added = [f"{full[tp]:.1%} ({whole[tp]:.1%})" if tp in full else "-" for tp in MAX_DEGREES]
        say(
            f"{row['model'] + ('*' if row['is_in_paper'] else ''):<16}{pages[0]:<18}{pages[1]:<20}"
            + "".join(f"{text:<18}" for text in added)
            + (f"{few[MAX_DEGREES[-1]]:.1%}" if MAX_DEGREES[-1] in few else "-")
        )
    say()
    say("rows between ranks; rows multiplied beyond an equal share (of the bytes of a step), by degree")
    for name in PRECISIONS:
        say(f"{name:<16}" + "".join(f"TP{tp:<20}" for tp in (1, *MAX_DEGREES)))
        for row in table:
            between, beyond, step = (
                row[key][name] for key in ("rows_between_ranks", "rows_beyond_share", "step_overhead")
            )
            texts = (f"{between[tp]}; {beyond:.1%} ({step[tp]:.1%})" for tp in between)
            say(f"{row['model']:<16}" + "".join(f"{text:<22}" for text in texts))
