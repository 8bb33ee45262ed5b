"""The model of a decode step: what it counts, and what it says where the answer is known."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.engines import EngineShape, greedy, load_engine
from bench.gpu import decode, model
from bench.gpu.parts import FOLDER
from bench.gpu.step_model import (
    DEVICES,
    DevicePeaks,
    StepShape,
    decode_launches,
    predict,
    weight_bytes,
)
from bus.precisions import QUANTIZED
from worker.model import layer
from worker.model.config import read_config
from worker.model.layout import plan_model
from worker.model.quantized_layout import plan_quantized

SHAPE = StepShape.of(decode.LLAMA_8B)
IDEAL = DevicePeaks(
    name="ideal", bytes_per_s=1e12, flops_per_s=1e15, kernel_s=0, launch_s=0, graph_s=0, step_s=0
)
# The launch of each call of the kernels.
LAUNCHES = {
    **dict.fromkeys(("linear", "linear_t"), "products"),
    **dict.fromkeys(("rms_norm", "add_rms_norm"), "norm"),
    "rotary_store_kv": "rotary_store_kv",
    "paged_attention": "attention",
    "silu_mul": "mix",
}


def test_the_launches_are_the_calls_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def count(*args: Any, **given: Any) -> Any:
            calls[name] += 1
            return call(*args, **given)

        return count

    for where in ("layer", "transformer", "linear"):
        for name in LAUNCHES:
            if call := getattr(import_module(f"worker.model.{where}"), name, None):
                monkeypatch.setattr(f"worker.model.{where}.{name}", counted(name, call))
    monkeypatch.setitem(layer._GATED, "silu", counted("silu_mul", layer._GATED["silu"]))
    (tmp_path / "config.json").write_text(json.dumps(decode.TINY))
    # Steps in float32 run as one recorded program on a CPU; in bfloat16 the first one finds that it cannot.
    engine = load_engine(tmp_path, EngineShape(max_num_seqs=2), 32, dtype=torch.bfloat16, load_format="dummy")
    engine.submit("bench", greedy("a", [1, 2, 3], 9))
    for _ in range(3):
        calls.clear()
        engine.step()
    modelled = Counter({one.name: one.count for one in decode_launches(StepShape.of(decode.TINY), 1, 4)})
    of_calls = Counter({LAUNCHES[name]: 0 for name in calls})
    for name, count in calls.items():
        of_calls[LAUNCHES[name]] += count
    products = sum(modelled.pop(name) for name in ("qkv", "o", "gate_up", "down", "head"))
    elsewhere = {"embed", "join", "to_float32", "largest"}  # of torch and, of attention, its second launch
    assert of_calls == {"products": products} | {
        name: count for name, count in modelled.items() if name not in elsewhere
    }


def test_the_bytes_are_the_weights_and_the_cache() -> None:
    made = predict(IDEAL, SHAPE, 64, 512)
    floor = decode.bytes_of_a_step(decode.GPU, 64, 512)
    assert floor < made.nbytes < 1.02 * floor
    assert made.eager_s == made.graphs_s == made.device_s
    assert made.device_s == pytest.approx(made.nbytes / IDEAL.bytes_per_s), "at these peaks bytes are all"


@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_quantised_weight_has_the_bytes_of_its_layout(precision: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(decode.LLAMA_8B))
    config = read_config(tmp_path)
    plan = plan_model(config, torch.bfloat16, 4096, 1)
    attention, feed_forward = plan_quantized(config, plan, 4096, precision)
    of_layer = sum(
        one.nbytes
        for one in decode_launches(SHAPE, 0, 0, precision)
        if one.name in ("qkv", "o", "gate_up", "down")
    )
    assert attention.nbytes + feed_forward.nbytes == pytest.approx(of_layer, rel=1e-3)
    assert weight_bytes("full", 4) == 4


def test_many_sequences_are_bound_by_operations_and_few_by_what_a_launch_costs() -> None:
    device = replace(IDEAL, flops_per_s=1e14)
    assert predict(device, SHAPE, 1, 1).bound_by == "bytes"
    assert predict(device, SHAPE, 256, 1).bound_by == "operations"
    slow_host = replace(IDEAL, launch_s=1e-3, graph_s=1e-3, step_s=0.5)
    made = predict(slow_host, SHAPE, 1, 1)
    assert made.bound_by == "host" and made.eager_s == pytest.approx(0.5 + made.launches * 1e-3)
    assert made.graphs_s == pytest.approx(0.5 + made.parts * 1e-3) and made.parts == 66
    empty = replace(IDEAL, kernel_s=1.0)
    assert predict(empty, SHAPE, 1, 1).bound_by == "kernels"


def test_a_step_of_more_sequences_never_takes_less_time() -> None:
    for device in DEVICES:
        for precision in model.PRECISIONS:
            times = [predict(device, SHAPE, n, 512, precision).graphs_s for n in range(1, 257)]
            assert times == sorted(times)


def test_measured_steps_are_held_against_the_peaks_of_their_run() -> None:
    row = {"sequences": 64, "context": 512, "step_ms": 9.0}
    part: dict[str, Any] = {
        "part": "decode",
        "bandwidth_gb_s": 3000.0,
        "peak_tflop_s": 800.0,
        "decode": [row],
    }
    graphs = {"part": "graphs", "decode": [row | {"step_ms": 8.0, "way": "graphs"}]}
    parts = {"decode": {"found": [part]}, "graphs": {"found": [graphs, {"part": "graphs"}]}}
    whole: dict[str, Any] = {"device": "NVIDIA H100", "parts": parts}
    results = [
        whole | {"device": "cpu"},
        whole,
        whole | {"parts": {"graphs": parts["graphs"]}},
        {"bench": "x"},
    ]
    made = list(model.measured_rows(results, SHAPE))
    expected = predict(DEVICES[0].measured(3e12, 8e14), SHAPE, 64, 512)
    assert [(one["device"], one["measured"]["step_ms"], one["graphs_s"]) for one in made] == [
        ("NVIDIA H100", 9.0, expected.graphs_s),
        ("NVIDIA H100", 8.0, expected.graphs_s),
    ]
    told = list(model.lines({"predicted": list(model.predicted_rows(SHAPE)), "beside": made}))
    assert told[-1].split()[-1] == f"{0.008 / expected.graphs_s:.2f}" and "graphs" in told[-1]
    assert len([one for one in told if one.startswith("Llama")]) == 4


def test_the_results_on_disk_are_those_of_this_run_or_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "RESULTS", tmp_path)
    monkeypatch.delenv(FOLDER, raising=False)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "nvidia-x.json").write_text('{"device": "X", "parts": {}}')
    (tmp_path / "gpu" / "card.json").write_text('{"part": "card"}')
    assert [one["device"] for one in model.stored()] == ["this GPU", "X"]
    monkeypatch.setenv(FOLDER, str(tmp_path / "gpu"))
    (found,) = model.stored()
    assert found["parts"] == {"card": {"found": [{"part": "card"}]}}
