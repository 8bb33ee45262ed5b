"""The whole service on a GPU: every process, morphs and a merge under load, and a burst.

    python -m bench.gpu service [--device cpu]

morphs  two workers on one device serve models/demo; while requests run, all layers are swapped to INT4 and
        back, the two workers become one tensor-parallel instance, and part again; no request may be lost
burst   one worker serves some layers of Llama 3 8B's shape, with a budget that full precision saturates; the
        same burst is sent at full precision and in the default mode; the bar is a P95 of the TTFT that is 2.9
        times lower

`--device cpu` takes models/demo for both, and a burst of some requests.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.common.load import Recorder, play
from bench.common.results import DEMO, quantile, say
from bench.common.service import STEADY, Service
from bench.gpu.common import Found, run_alone
from bench.gpu.decode import LLAMA_8B
from bus.morphs import MorphReport
from bus.names import Names
from instar.replay.schemas import Arrival

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
VOCABULARY = range(16, 4000)
MODES = ("manual", "default", "performance")  # of the policy; the first keeps full precision
START_S = 100.0  # within which workers must serve; most of it is compiling
BAR = 2.9


@dataclass(frozen=True, slots=True)
class Sizes:
    """The two scenes. Seconds, requests per second, tokens of a request, MiB of a worker's budget."""

    dtype: str
    config: Mapping[str, Any] | None  # of the burst's model; None: models/demo
    demo_mb: int
    burst_mb: int
    load_s: float
    load_rate: float
    calm_s: float
    burst_s: float
    calm_rate: float
    burst_rate: float
    prompt_tokens: int
    output_tokens: int


GPU = Sizes(
    dtype="bfloat16",
    config=LLAMA_8B | {"num_hidden_layers": 16, "vocab_size": 4096, "max_position_embeddings": 2048},
    demo_mb=1024,
    burst_mb=7900,
    load_s=8.0,
    load_rate=6.0,
    calm_s=2.0,
    burst_s=6.0,
    calm_rate=4.0,
    burst_rate=40.0,
    prompt_tokens=256,
    output_tokens=256,
)
CPU = Sizes(
    dtype="float32",
    config=None,
    demo_mb=64,
    burst_mb=48,
    load_s=4.0,
    load_rate=1.0,
    calm_s=0.5,
    burst_s=1.0,
    calm_rate=2.0,
    burst_rate=4.0,
    prompt_tokens=24,
    output_tokens=16,
)


class QuickService(Service):
    """A service that is given up, with its logs, if it does not begin to serve soon."""

    start_s = START_S


def measure(device: torch.device, found: Found) -> None:
    sizes = GPU if device.type == "cuda" else CPU
    for scene in (_morphs, _burst):
        try:
            scene(device, sizes, found)
        except BaseException as error:  # the other scene tells more
            if not isinstance(error, Exception):
                say(_notes(error))  # the limit of this part has passed
                raise
            found.problem(f"{scene.__name__[1:]}: {type(error).__name__}: {error}\n" + _notes(error))


def _notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))[-6000:]


def _settings(device: torch.device, sizes: Sizes, memory_mb: int, **more: str) -> dict[str, str]:
    own = {
        "WORKER__DEVICE": str(device),
        "WORKER__DTYPE": sizes.dtype,
        "WORKER__MEMORY_MB": str(memory_mb),
        "WORKER__THREADS": "2" if device.type == "cuda" else "1",
        "LOG__LEVEL": "info",
    }
    return STEADY | own | more


# --------------------------------------------------------------------------- morphs under load


def _morphs(device: torch.device, sizes: Sizes, found: Found) -> None:
    began = time.perf_counter()
    settings = _settings(device, sizes, sizes.demo_mb, WORKER__MAX_TP="2", WORKER__VARIANTS='["int4"]')
    with QuickService(num_workers=2, settings=settings) as service:
        service.set_policy(mode="manual")
        found.put(demo_ready_s=round(time.perf_counter() - began, 1))
        found.put(says=_completion(service))
        ends: list[Recorder] = []
        arrivals = _arrivals(sizes, [(0.0, sizes.load_s, sizes.load_rate)], seed=1)
        load = threading.Thread(target=lambda: ends.append(play(service.url(), arrivals, drain_s=60.0)))
        load.start()
        for name, seconds in _orders(service):
            found.add("orders", {"order": name, "ms": round(1e3 * seconds, 1)})
        load.join()
        found.put(morphs=_served(ends[0]), says_afterwards=_completion(service))
        if found.values["says"] != found.values["says_afterwards"]:
            found.problem(f"the completion was {found.values['says']!r} and is {_completion(service)!r}")
        if found.values["morphs"]["lost"]:
            found.problem(f"{found.values['morphs']['lost']} requests lost beside morphs")
        _check_compiled(service, found)


def _orders(service: Service) -> Iterator[tuple[str, float]]:
    """Order every kind of morph, and yield its name and seconds."""
    first = service.state()["instances"][0]
    layers = first["num_layers"]
    for name, what, body in (
        ("swap to int4", f"{first['id']}/swap", {"count": layers, "precision": "int4", "wait_s": 10.0}),
        ("swap to full", f"{first['id']}/swap", {"count": layers, "precision": "full", "wait_s": 10.0}),
        ("tp 2", "transform", {"workers": ["w0", "w1"], "tp": 2}),
        ("tp 1", "transform", {"workers": ["w0", "w1"], "tp": 1}),
    ):
        began = time.perf_counter()
        service.apply(what, body)
        yield name, time.perf_counter() - began


def _completion(service: Service) -> str:
    body = {"model": "demo", "prompt": "The os module", "max_tokens": 24, "temperature": 0, "seed": 1}
    answer = httpx.post(f"{service.url()}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


# --------------------------------------------------------------------------- a burst


def _burst(device: torch.device, sizes: Sizes, found: Found) -> None:
    phases = [
        (0.0, sizes.calm_s, sizes.calm_rate),
        (sizes.calm_s, sizes.calm_s + sizes.burst_s, sizes.burst_rate),
    ]
    with _model(sizes) as model:
        settings = _settings(
            device,
            sizes,
            sizes.burst_mb,
            WORKER__LOAD_FORMAT="dummy" if sizes.config else "safetensors",
            WORKER__MAX_NUM_SEQS="256",
            WORKER__MAX_TP="1",
            WORKER__VARIANTS='["int4"]',
            **({"WORKER__MAX_NUM_BATCHED_TOKENS": "2048"} if device.type == "cuda" else {}),
        )
        began = time.perf_counter()
        with QuickService(settings=settings, model=model) as service:
            found.put(burst_ready_s=round(time.perf_counter() - began, 1))
            instance = service.state()["instances"][0]
            found.put(blocks_at_full=instance["kv"]["blocks"])
            # The last calm seconds and the first morphs are behind before the next way begins.
            for mode in MODES:
                service.set_policy(mode=mode)
                since = time.time()
                recorder = play(service.url(), _arrivals(sizes, phases, seed=2), drain_s=60.0)
                row = {"mode": mode} | _served(recorder)
                events = service.messages(Names().events, MorphReport, since)
                row["morphs"] = sum(each.state == "applied" for each in events)
                full = found.values.get("burst", [row])[0]["ttft_p95_ms"]
                row["times_lower"] = round(full / row["ttft_p95_ms"], 2) if row["ttft_p95_ms"] else None
                found.add("burst", row)
                say(json.dumps(row))
                if row["lost"]:
                    found.problem(f"{row['lost']} requests lost in the burst, mode {mode}")
            _check_compiled(service, found)


def _check_compiled(service: Service, found: Found) -> None:
    """Put a problem for each worker that compiled kernels while it served; its log names them."""
    for worker in service.state()["workers"]:
        if late := (worker["gpu"] or {}).get("kernels_compiled_late"):
            log = [line for line in service.logs().splitlines() if "was not compiled before" in line]
            found.problem(f"{worker['id']} compiled {late} kernels while serving:\n" + "\n".join(log)[:4000])


@contextmanager
def _model(sizes: Sizes) -> Iterator[Path]:
    if sizes.config is None:
        yield DEMO
        return
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as name:
        (Path(name) / "config.json").write_text(json.dumps(dict(sizes.config)))
        for file in TOKENIZER:
            shutil.copy(DEMO / file, name)
        yield Path(name)


def _arrivals(sizes: Sizes, phases: list[tuple[float, float, float]], seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    found = []
    for begins, ends, rate in phases:
        for at in sorted(rng.uniform(begins, ends) for _ in range(round(rate * (ends - begins)))):
            prompt = rng.choices(VOCABULARY, k=sizes.prompt_tokens)
            found.append(Arrival(at, len(prompt), sizes.output_tokens, prompt))
    return found


def _served(recorder: Recorder) -> dict[str, Any]:
    outcomes = recorder.run.outcomes
    served = [one for one in outcomes if one.is_served and one.finish == "length"]
    ttft = [one.ttft_s for one in served if one.ttft_s is not None]
    problems = [one.error or one.finish for one in outcomes if one not in served]
    return {
        "requests": len(outcomes),
        "lost": len(outcomes) - len(served),
        "why": str(problems[0])[:300] if problems else "",
        "ttft_p50_ms": round(1e3 * (quantile(ttft, 0.5) or 0.0), 1),
        "ttft_p95_ms": round(1e3 * (quantile(ttft, 0.95) or 0.0), 1),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    if "says" in found:
        yield f"the demo model on this device, ready in {found['demo_ready_s']} s, says {found['says']!r}"
    for row in found.get("orders", []):
        yield f"{row['order']} under load: {row['ms']:.0f} ms"
    if row := found.get("morphs"):
        yield f"{row['requests']} requests beside these morphs, {row['lost']} lost"
    for row in found.get("burst", []):
        yield (
            f"burst, mode {row['mode']}: TTFT P50 {row['ttft_p50_ms']:.0f} ms, P95 {row['ttft_p95_ms']:.0f},"
            f" {row['times_lower']} times lower than at full precision (bar {BAR}), {row['morphs']} morphs,"
            f" {row['lost']} of {row['requests']} requests lost"
        )


def main() -> int:
    return run_alone(__doc__, "service", measure, lines)
