"""The cost of ending every FFN shard of every degree on a page, for models of known sizes.

    python -m bench.transform padding

Left, a tensor's size in CUDA's pages of 2 MiB in bfloat16, alone and split in four: where that is no whole
number, unmapping cannot give back what the other ranks hold (Gyges, Table 3: the four models marked with *).
Right, what the engine's padding (`worker.model.layout`) adds to the FFN and to all weights. Bar: the paper's
0 to 14 % for degrees up to 4.

Experts of one layer count as one matrix, [experts * intermediate, hidden]: each rank has some rows of it. The
engine gives each rank whole experts, and pads them less (`worker.model.layout.pad_expert`). Attention biases,
sinks and routers are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait
from bench.common.results import bar, conclude, say, say_bars

# isort: split
import torch

from worker.model.config import ModelConfig, Rope
from worker.model.layout import Padded, pad_ffn, plan_model

PAGE_BYTES = 2 << 20
DTYPE = torch.bfloat16
DEGREES = (2, 4, 8)
BAR_DEGREE, BAR = 4, 0.14


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
    is_in_paper: bool = False

    def config(self) -> ModelConfig:
        return ModelConfig(
            folder=Path(self.name),
            architecture="",
            dtype=DTYPE,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate * max(1, self.num_experts),
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
        )


MODELS = (
    PaddingSizes("GPT-OSS-120B", 2880, 2880, 36, 64, 8, 64, 201088, 128, is_in_paper=True),
    PaddingSizes("GPT-OSS-20B", 2880, 2880, 24, 64, 8, 64, 201088, 32, is_in_paper=True),
    PaddingSizes("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256, is_in_paper=True),
    PaddingSizes("Qwen2.5-32B", 5120, 27648, 64, 40, 8, 128, 152064, is_in_paper=True),
    PaddingSizes("Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936),
    PaddingSizes("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256),
    PaddingSizes("Llama-2-7B", 4096, 11008, 32, 32, 32, 128, 32000),
)


def pages_per_tensor(model: PaddingSizes, tp: int) -> list[float]:
    """Return the pages of one shard of a matrix; for a mixture also of `gate` and `up`, stored as one."""
    config = model.config()
    pages = config.hidden_size * config.intermediate_size * DTYPE.itemsize / PAGE_BYTES / tp
    return [pages, 2 * pages] if model.num_experts else [pages]


def padded(model: PaddingSizes, max_tp: int) -> Padded:
    return pad_ffn(model.config(), DTYPE, PAGE_BYTES, max_tp)


def ffn_overhead(model: PaddingSizes, max_tp: int) -> float:
    """Return the share that padding adds to the FFN, for shards of every degree up to max_tp."""
    stored, config = padded(model, max_tp), model.config()
    return stored.rows * stored.row_size / (config.intermediate_size * config.hidden_size) - 1


def model_overhead(model: PaddingSizes, max_tp: int) -> float:
    """Return the share that padding adds to all weights."""
    plan = plan_model(model.config(), DTYPE, PAGE_BYTES, max_tp)
    return plan.padding_bytes / plan.weight_bytes


def rows() -> Iterator[dict[str, Any]]:
    for model in MODELS:
        yield {
            "model": model.name,
            "is_in_paper": model.is_in_paper,
            "pages_per_tensor": {f"TP{tp}": pages_per_tensor(model, tp) for tp in (1, 4)},
            "padded_rows": {tp: padded(model, tp).rows for tp in DEGREES},
            "padded_row_elements": {tp: padded(model, tp).row_size for tp in DEGREES},
            "ffn_overhead": {tp: round(ffn_overhead(model, tp), 4) for tp in DEGREES},
            "model_overhead": {tp: round(model_overhead(model, tp), 4) for tp in DEGREES},
        }


def main() -> int:
    table = list(rows())
    worst = max(row["ffn_overhead"][BAR_DEGREE] for row in table)
    bars = {f"most that padding adds to an FFN, degrees up to {BAR_DEGREE}": bar(BAR, worst, worst <= BAR)}
    found = {"bench": "padding", "page_bytes": PAGE_BYTES, "models": table, "bars": bars}
    _say_card(table)
    say_bars(bars)
    return conclude(found, is_kept=True, bars=bars)


def _say_card(table: list[dict[str, Any]]) -> None:
    say(f"{'':<16}{'pages per tensor':<42}{'added to FFN (weights), for degrees up to'}")
    say(f"{'':<16}{'TP1':<18}{'TP4':<24}" + "".join(f"{tp:<18}" for tp in DEGREES))
    for row in table:
        pages = [" / ".join(f"{n:.9g}" for n in row["pages_per_tensor"][tp]) for tp in ("TP1", "TP4")]
        added = [f"{row['ffn_overhead'][tp]:.1%} ({row['model_overhead'][tp]:.1%})" for tp in DEGREES]
        say(
            f"{row['model'] + ('*' if row['is_in_paper'] else ''):<16}{pages[0]:<18}{pages[1]:<24}"
            + "".join(f"{text:<18}" for text in added)
        )
