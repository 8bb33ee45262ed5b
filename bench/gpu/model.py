"""The time of a decode step by a model (`bench/gpu/step_model.py`), beside what was measured.

    python -m bench.gpu model

Predicts Llama 3 8B in bfloat16 and in INT4 on an H100 and an H200, with the peaks of their data sheets, for 1
to 256 sequences. Steps that `bench.gpu decode` and `graphs` measured, here or in a file of bench/results/gpu,
are held against predictions with the bandwidth and the peak that their run reached. Needs no GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from bench.common.results import RESULTS, parser, say
from bench.gpu.common import Found
from bench.gpu.decode import LLAMA_8B
from bench.gpu.parts import FOLDER
from bench.gpu.step_model import DEVICES, StepShape, predict
from bus.precisions import Precision

PRECISIONS: Final[tuple[Precision, ...]] = ("full", "int4")
SEQUENCES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT: Final = 512
MEASURED: Final = ("decode", "graphs", "card")  # parts whose rows and peaks are read


def predicted_rows(shape: StepShape) -> Iterator[dict[str, Any]]:
    """Yield a prediction for each device, precision and number of sequences."""
    for device in DEVICES:
        for precision in PRECISIONS:
            for num_seqs in SEQUENCES:
                yield {"device": device.name, **asdict(predict(device, shape, num_seqs, CONTEXT, precision))}


def measured_rows(results: Iterable[Mapping[str, Any]], shape: StepShape) -> Iterator[dict[str, Any]]:
    """Yield each measured decode beside its prediction. results: whole ones of `bench.gpu`."""
    for result in results:
        parts = result.get("parts", {})
        found = [one for name in MEASURED for one in parts.get(name, {}).get("found", [])]
        peaks = next((one for one in found if {"bandwidth_gb_s", "peak_tflop_s"} <= one.keys()), None)
        if result.get("device", "cpu") == "cpu" or peaks is None:  # a dry run has another model
            continue
        device = replace(DEVICES[0], name=result["device"]).measured(
            peaks["bandwidth_gb_s"] * 1e9, peaks["peak_tflop_s"] * 1e12
        )
        for row in (row for one in found for row in one.get("decode", [])):
            made = predict(device, shape, row["sequences"], row["context"], row.get("precision", "full"))
            yield {"device": device.name, "measured": row, **asdict(made)}


def stored() -> Iterator[Mapping[str, Any]]:
    """Yield the results on disk: of the run that this is a part of, else all of bench/results/gpu."""
    folder = Path(os.environ.get(FOLDER) or RESULTS / "gpu")
    paths = {name: folder / f"{name}.json" for name in MEASURED}
    own = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    yield {"device": "this GPU", "parts": {name: {"found": [one]} for name, one in own.items()}}
    if FOLDER not in os.environ:
        for path in sorted(set(folder.glob("*.json")) - set(paths.values())):
            yield json.loads(path.read_text())


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table for each device and precision, and one of what was measured."""
    head = f"{'seqs':>5}{'launches':>9}{'GB':>7}{'TFLOP':>7}{'device':>8}{'eager':>8}{'graphs':>8}  bound by"
    tables: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in found.get("predicted", []):
        tables.setdefault((row["device"], row["precision"]), []).append(row)
    for (device, precision), rows in tables.items():
        name = "bfloat16" if precision == "full" else precision
        yield f"Llama 3 8B in {name} on an {device}, contexts of {CONTEXT}: ms a step, predicted"
        yield head
        for row in rows:
            work = f"{row['nbytes'] / 1e9:7.2f}{row['flops'] / 1e12:7.3f}"
            times = "".join(_ms(row, name) for name in ("device_s", "eager_s", "graphs_s"))
            yield f"{row['num_seqs']:5d}{row['launches']:9d}{work}{times}  {row['bound_by']}"
    if not found.get("beside"):
        yield "measured: nothing yet (python -m bench.gpu decode)"
        return
    yield f"{'ms a step':46}{'measured':>9}{'eager':>8}{'graphs':>8}{'of eager':>9}{'of graphs':>10}"
    for row in found["beside"]:
        way = row["measured"].get("way", "")
        case = f"{row['device']} {row['num_seqs']} x {row['context']:.0f} {row['precision']} {way}"
        measured_s = row["measured"]["step_ms"] / 1e3
        yield (
            f"{case:46}{measured_s * 1e3:9.2f}{_ms(row, 'eager_s')}{_ms(row, 'graphs_s')}"
            f"{measured_s / row['eager_s']:9.2f}{measured_s / row['graphs_s']:10.2f}"
        )


def _ms(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name] * 1e3:8.2f}"


def main() -> int:
    """Run the part, on any machine. Return the exit status."""
    options = parser(__doc__)
    options.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: hold nothing against it"
    )
    args = options.parse_args()
    shape, found = StepShape.of(LLAMA_8B), Found("model", is_kept=FOLDER in os.environ)
    found.put(predicted=list(predicted_rows(shape)))
    if args.device == "cuda":
        found.put(beside=list(measured_rows(stored(), shape)))
    found.put(is_whole=True)
    for line in lines(found.values):
        say(line)
    say(json.dumps(found.values))
    return 0
