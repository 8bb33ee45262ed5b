"""The cost of swapped layers in quality: perplexity of the demo model on its held-out text.

    python -m bench.quality [--windows 40] [--mixed-windows 6] [--methods awq,rtn] [--precisions int4,int3]

Three questions. How fast does perplexity rise with the number of swapped layers, for the profile's order
(LIS) against front-to-back, back-to-front and random ones? Does a text whose precision changes on the way
(the rows of MorphServe's Table 1) lie between all-quantised and full? And what does a KV cache in 8 bits
cost? All shapes see the same windows, so every comparison is paired and has a standard error. Dense weights
that make the same products stand for the codes; tests hold them to the engine's own numbers. Prints a card,
writes bench/results/quality.json and quality.png, and ends in one JSON line.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernels  # before torch: it settles how torch's threads wait
from bench.common.results import DEMO, RESULTS, conclude, parser, say

# isort: split
import torch

from bench.quality.perplexity import CorpusText, Evaluator, Shape, difference, perplexity, swapped
from bench.quality.setup import QualityModel, held_out, make_missing_sets, open_demo
from bus.precisions import KV_PRECISIONS, Precision
from worker.shape.layer_order import load_order, plain_order

RANDOM_SEEDS = (1, 2, 3)
CONTEXT, OUTPUT = 1024, 1024  # tokens of a mixed window: prompt, and what is generated after it
SIGNIFICANT = 2.0  # standard errors


# --------------------------------------------------------------------------- orders


def orders_of(model: QualityModel) -> dict[str, list[list[int]]]:
    """Return the orders by name; there are several random ones, whose mean counts."""
    config = model.config
    return {
        "LIS": [load_order(DEMO, "profile")[0]],
        "front-to-back": [plain_order(config, "front-to-back")],
        "back-to-front": [plain_order(config, "back-to-front")],
        "random": [plain_order(config, "random", seed) for seed in RANDOM_SEEDS],
    }


def counts_of(num_layers: int) -> list[int]:
    """Return 0, 1, 2, 4, ... and `num_layers`."""
    powers = [2**i for i in range(num_layers.bit_length()) if 2**i < num_layers]
    return [0, *powers, num_layers]


def by_order(model: QualityModel, text: CorpusText, name: str) -> dict[str, Any]:
    """Return the perplexity of each order at each count, and how LIS compares.

    `name` is that of the quantised weights.
    """
    orders, counts = orders_of(model), counts_of(model.config.num_layers)
    shapes = {swapped(order, count, name) for same in orders.values() for order in same for count in counts}
    losses = Evaluator(model.whole, model.layers).losses(text, sorted(shapes))
    curves: dict[str, list[list[float]]] = {  # at each count, the mean loss of each window
        order_name: [_mean([losses[swapped(order, count, name)] for order in same]) for count in counts]
        for order_name, same in orders.items()
    }
    return {
        "counts": counts,
        "perplexity": {order: [perplexity(points) for points in curve] for order, curve in curves.items()},
        "LIS_minus": {
            order: [difference(ours, theirs) for ours, theirs in zip(curves["LIS"], curve, strict=True)]
            for order, curve in curves.items()
            if order != "LIS"
        },
        "all_minus_full": difference(curves["LIS"][-1], curves["LIS"][0]),
    }


def perplexities(order: Sequence[int], precision: Precision, num_windows: int) -> list[float]:
    """Return the perplexity with the first 0, 1, ... all layers of `order` in `precision`.

    The method is the default one. Windows have 512 tokens, the longest sequence that the morph benchmark's
    service takes.
    """
    kernels.configure(2)
    model = open_demo(DEMO, precision, method="", name=precision)
    shapes = [swapped(order, count, precision) for count in range(len(order) + 1)]
    losses = Evaluator(model.whole, model.layers).losses(CorpusText(held_out(512, num_windows)), shapes)
    return [perplexity(losses[shape]) for shape in shapes]


def _mean(losses: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*losses, strict=True)]


# --------------------------------------------------------------------------- precision over time


def mixtures(low: Shape, full: Shape) -> dict[str, list[tuple[int, Shape]]]:
    """Return the rows of MorphServe's Table 1, its lengths halved.

    The output begins at CONTEXT; the prompt has the precision that the output begins with.
    """
    half, quarter, eighth = OUTPUT // 2, OUTPUT // 4, OUTPUT // 8

    def alternating(first: Shape, second: Shape) -> list[tuple[int, Shape]]:
        later = [(CONTEXT + i * eighth, (first, second)[i % 2]) for i in range(1, 8)]
        return [(0, first), *later]

    return {
        "all low": [(0, low)],
        "first half full, last half low": [(0, full), (CONTEXT + half, low)],
        "first half low, last half full": [(0, low), (CONTEXT + half, full)],
        "full, middle half low, full": [(0, full), (CONTEXT + quarter, low), (CONTEXT + 3 * quarter, full)],
        "low, middle half full, low": [(0, low), (CONTEXT + quarter, full), (CONTEXT + 3 * quarter, low)],
        f"switch every {eighth}, from low": alternating(low, full),
        f"switch every {eighth}, from full": alternating(full, low),
        "all full": [(0, full)],
    }


def over_time(model: QualityModel, text: CorpusText, name: str) -> dict[str, Any]:
    """Return the perplexity of each row, and whether it lies between the bounds within its standard error."""
    num_layers = model.config.num_layers
    low, full = (name,) * num_layers, ("full",) * num_layers
    evaluator = Evaluator(model.whole, model.layers)
    losses = {row: evaluator.mixed_losses(text, pieces) for row, pieces in mixtures(low, full).items()}
    rows = {}
    for row, values in losses.items():
        above, above_se = difference(values, losses["all full"])
        below, below_se = difference(losses["all low"], values)
        rows[row] = {
            "perplexity": perplexity(values),
            "above_full": [above, above_se],
            "below_low": [below, below_se],
            "within_bounds": above >= -SIGNIFICANT * above_se and below >= -SIGNIFICANT * below_se,
        }
    return rows


# --------------------------------------------------------------------------- the KV cache


def in_8_bits(folder: Path, text: CorpusText) -> dict[str, Any]:
    """Return the perplexity with the KV cache in 8 bits, for layers in full and in int4 precision."""
    losses = {}
    for kv in KV_PRECISIONS:
        model = open_demo(folder, "int4", "rtn", "int4", kv)
        shapes = [(name,) * model.config.num_layers for name in ("full", "int4")]
        losses[kv] = Evaluator(model.whole, model.layers).losses(text, shapes)
    found = {}
    for shape, values in losses["int8"].items():
        found[f"layers in {shape[0]}"] = {
            "full": perplexity(losses["full"][shape]),
            "int8": perplexity(values),
            "int8_minus_full": difference(values, losses["full"][shape]),
        }
    return found


# --------------------------------------------------------------------------- the card


def show_orders(name: str, found: dict[str, Any]) -> None:
    say(f"\n{name:<16}" + "".join(f"{count:>10}" for count in found["counts"]) + "   swapped layers")
    for order, values in found["perplexity"].items():
        say(f"  {order:<14}" + "".join(f"{value:>10.3f}" for value in values))
    for order, values in found["LIS_minus"].items():
        cells = (f"{1000 * mean:+.1f}±{1000 * error:.1f}" for mean, error in values)
        say(f"  LIS - {order:<14}" + "".join(f"{cell:>11}" for cell in cells) + "   millinats per token")


def show_rows(name: str, rows: dict[str, Any]) -> None:
    gap, error = rows["all low"]["above_full"]
    remark = "" if gap > SIGNIFICANT * error else ": this much text does not separate the bounds"
    say(f"\n{name}, changed on the way{remark}")
    for row, found in rows.items():
        mark = "" if found["within_bounds"] else "   OUTSIDE"
        say(f"  {row:<32}{found['perplexity']:>10.3f}{mark}")


def show_kv(found: dict[str, Any]) -> None:
    say("\nKV cache          full      int8")
    for name, row in found.items():
        nats, error = row["int8_minus_full"]
        say(
            f"  {name:<14}{row['full']:>8.3f}{row['int8']:>10.3f}"
            f"   {1000 * nats:+.2f}±{1000 * error:.2f} millinats per token"
        )


def verdicts(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return where LIS is above a baseline, and by how much."""
    said = []
    for name, result in found.items():
        for order, values in result["LIS_minus"].items():
            for count, (mean, error) in zip(result["counts"], values, strict=True):
                if mean > 0:
                    kind = "clearly" if mean > SIGNIFICANT * error else "within noise"
                    said.append(
                        f"{name}, {count} layers: LIS above {order} by {1000 * mean:.2f} ±"
                        f" {1000 * error:.2f} millinats ({kind})"
                    )
    return said


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--windows", type=int, default=40, help="of 512 tokens, for the orders")
    options.add_argument(
        "--mixed-windows", type=int, default=6, help="of 2,048 tokens, for changing precision"
    )
    options.add_argument("--methods", default="awq,rtn")
    options.add_argument("--precisions", default="int8,int4,int3")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    text, mixed = (
        CorpusText(held_out(512, args.windows)),
        CorpusText(held_out(CONTEXT + OUTPUT, args.mixed_windows), CONTEXT),
    )
    say(f"{text.num_scored} held-out tokens for the orders, {mixed.num_scored} for changes on the way")
    orders, changes = {}, {}
    with tempfile.TemporaryDirectory(prefix="instar-quality-") as folder:
        make_missing_sets(Path(folder), args.methods.split(","), args.precisions.split(","))
        kv = in_8_bits(Path(folder), text)
        show_kv(kv)
        for method in args.methods.split(","):
            for precision in args.precisions.split(","):
                name = f"{precision} {method}"
                model = open_demo(Path(folder), precision, method, name)
                orders[name] = by_order(model, text, name)
                show_orders(name, orders[name])
                if precision != "int8":
                    changes[name] = over_time(model, mixed, name)
                    show_rows(name, changes[name])
    above = verdicts(orders)
    result = {
        "bench": "quality",
        "windows": list(text.windows.shape),
        "mixed_windows": list(mixed.windows.shape),
        "lis_order": load_order(DEMO, "profile")[0],
        "orders": orders,
        "over_time": changes,
        "kv": kv,
        "LIS_above": above,
        "seconds": round(time.perf_counter() - began, 1),
    }
    say("\nLIS above a baseline:" + "".join(f"\n  {line}" for line in above or ["nowhere"]))
    from bench.quality.plot import plot

    plot(result, RESULTS / "quality.png")
    return conclude(result, is_kept=True)
