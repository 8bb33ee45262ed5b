"""The cost of changing the degree of tensor parallelism, part by part, each beside what it replaces.

    python -m bench.transform costs [--quick]

Four ranks on the CPU in float32, a process each, one thread each; random weights (100M) and KV. The ways of a
part take turns in one run, and a part's time is that of its slowest rank.

KV         TP1 to TP4 at 90 % use: in place, against migrating and trimming. Bars: at least 90 % less memory,
           2.5 times less time, never more memory than a stage may take
weights    unmapping padded shards, against copying the rows that stay to the front and unmapping the rest
rows       of a layer's FFN, TP4 to TP1: from peers, from host images, from the checkpoint; which is chosen
padding    FFN time with it, against without. Bar: under 1 % longer at any degree
whole      weights and KV of all layers, against stopping and going through shared host memory. Bars: at least
           30 times cheaper for the step that pays most (one layer a step, or the stop), and in all
steps      of 4 engines that decode, while 1 to all layers change in a step
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
from bench.common.results import RESULTS, conclude, parser, say

# isort: split
from bench.common.dummy_model import saved_model
from bench.common.engines import silence
from bench.transform import group as transform_group
from bench.transform import kv as transform_kv
from bench.transform import rows as transform_rows
from bench.transform import weights as transform_weights
from bench.transform import whole as transform_whole
from bench.transform.plot import draw
from bench.transform.ranks import run_ranks
from bench.transform.report import (
    bars,
    kv_found,
    products_found,
    rows_found,
    say_card,
    shards_found,
    steps_found,
    whole_found,
)

RANKS = 4
SIZE = "100M"
STAGE_BYTES = 8 << 20
WHOLE_KV_BYTES, WHOLE_KV_USE = 96 << 20, 0.9  # a quarter of the weights, as on the papers' GPUs
SETTINGS = (1, 3, 12)  # layers per step


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    args = options.parse_args()
    silence()
    began = time.monotonic()
    found = measure(args.quick)
    found |= {"quick": args.quick, "seconds": round(time.monotonic() - began)}
    say_card(found)
    if not args.quick:
        draw(found, RESULTS / "transform.png")
    return conclude(found, is_kept=not args.quick, bars=found["bars"])


def measure(is_quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"bench": "transform", "ranks": RANKS, "stage_bytes": STAGE_BYTES}
    rounds = 1 if is_quick else 4
    sizes = transform_kv.Sizes()
    ranks = run_ranks(RANKS, transform_kv.measure, sizes, 2, rounds, STAGE_BYTES)
    found["kv"] = kv_found(ranks, sizes.blocks * sizes.block_bytes)
    say("KV is done")
    kernels.configure(1)
    found["weights"] = shards_found(transform_weights.measure_shards(SIZE, rounds))
    found["padding"] = products_found(transform_weights.measure_products(10 if is_quick else 60))
    say("weights and padding are done")
    with saved_model(SIZE) as folder, _shared_memory() as shared:
        arguments = folder, WHOLE_KV_BYTES, WHOLE_KV_USE, rounds, STAGE_BYTES, shared
        found["whole"] = whole_found(run_ranks(RANKS, transform_whole.measure, *arguments))
        say("the whole is done")
        ranks = run_ranks(RANKS, transform_rows.measure, folder, rounds, STAGE_BYTES, shared)
        found["rows"] = rows_found(ranks, *transform_rows.missing_and_whole(folder, RANKS))
        say("rows are done")
        changes, calm = transform_group.measure(
            folder,
            SETTINGS[::2] if is_quick else SETTINGS,
            1 if is_quick else 2,
            megabytes=640,
            sequences=4,
        )
        found["steps"] = steps_found(changes, calm)
    found["bars"] = bars(found)
    return found


@contextlib.contextmanager
def _shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="instar-bench-", dir="/dev/shm") as folder:
        yield Path(folder)
