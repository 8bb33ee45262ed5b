"""The time of a token by part, on the CPU: engine, lock, Redis, gateway and socket.

    python -m bench.engine steps [--model FOLDER] [--streams 1] [--tokens 512] [--dtype float32] [--quick]

Streams over HTTP decode in the real service, whose worker and gateway note when they do what
(`bench.engine.watched`). Three tables, in milliseconds:

    a token, by part of the engine's thread. Its parts add up to the time between two tokens. `launch` is to
    wake the team and run the first kernel, `lock` from the last kernel until the interpreter's lock is back,
    `between` what the thread does from step to step, `watch` what the notes of this benchmark take. The parts
    inside of a recorded step are told by the processor's cycle counter behind each kernel. A step that is not
    recorded, since a product of it is torch's, has none of `launch` and `lock`, and its kernels are timed one
    by one. Of all these parts the thread was `asleep` for the lock or the team, or had `no core`.

    the cores, by who takes their time for a token. On a machine whose cores all compute, each part beside the
    engine's two stops a thread of the team, and the others wait for it.

    the way of a token from the end of its step to the client, by what it waits for.

The floor is the weights that a step reads, at the memory's speed in a plain sum.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
import psutil

from bench.common.dummy_model import model_folder
from bench.common.load import VOCABULARY, Recorder, play_to_end
from bench.common.machine import describe_machine
from bench.common.results import busy_lines, conclude, parser, quantile, say
from bench.common.service import STEADY, OtherPrograms, Process, Service
from instar.replay.requests import Dialect
from instar.replay.schemas import Arrival

SETTINGS: Final = STEADY | {"WORKER__THREADS": "0", "WORKER__MEMORY_MB": "2048"}
PROMPT_TOKENS: Final = 32
WAY: Final = ("to the event loop", "Redis", "gateway", "socket")
SKIPPED: Final = 8  # first tokens of a stream, which are not measured
PARTS: Final = (
    *("schedule", "prepare", "launch", "products", "attention", "rows", "lock", "sample", "publish"),
    *("rest", "between", "watch"),
)
OF_THESE: Final = ("asleep", "no core")
WATCHED: Final = ("worker", "gateway")

Samples = dict[str, list[float]]


class WatchedService(Service):
    """The service with a worker and a gateway that write notes when they end."""

    start_s = 600.0  # the first start of a worker compiles kernels

    def add(self, name: str, module: str, **env: str) -> Process:
        if module in WATCHED:
            env |= {"WATCH": module, "WATCH_FILE": str(self.folder / f"{module}.json")}
            module = "bench.engine.watched"
        return super().add(name, module, **env)

    def notes(self) -> dict[str, Any]:
        """End the watched processes and return the notes of both."""
        for name in ("gateway0", "w0"):
            if status := self.processes[name].terminate():
                raise RuntimeError(f"{name} ended with status {status}")
        return {
            key: value
            for module in WATCHED
            for key, value in _read(self.folder / f"{module}.json", module).items()
        }


def _read(file: Path, module: str) -> dict[str, Any]:
    notes: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    return {f"{module} {name}": value for name, value in notes.items()}


@dataclass(slots=True)
class Run:
    """The notes, the times of events, and the seconds of threads and processes, of one load."""

    notes: dict[str, Any]
    began: float  # of time.perf_counter, as all times here
    event_s: list[float]  # when each came to the client, of all streams, in order
    window: tuple[float, float]  # in which all streams decode
    cores: dict[str, float]  # seconds of a core by thread or process, while the load ran
    num_tokens: int
    foreign_cores: float


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="a model folder; without one, 30M random weights")
    options.add_argument("--streams", type=int, default=1, help="that decode together")
    options.add_argument("--tokens", type=int, default=512, help="of each stream")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options.add_argument("--quick", action="store_true", help="64 tokens, and no result is kept")
    args = options.parse_args()
    machine = describe_machine()
    with ExitStack() as stack:
        folder = args.model or stack.enter_context(model_folder("30M"))
        settings = SETTINGS | {"WORKER__DTYPE": args.dtype}
        service = stack.enter_context(WatchedService(model=folder.absolute(), settings=settings))
        service.set_policy(mode="manual")
        run = measure(service, args.streams, 64 if args.quick else args.tokens)
    result = {
        "bench": "steps",
        "streams": args.streams,
        "dtype": args.dtype,
        **machine,
        **report(run, machine),
    }
    return conclude(result, is_kept=not args.quick)


def measure(service: WatchedService, streams: int, tokens: int) -> Run:
    _play(service, streams, min(tokens, 64))
    threads, others, began = Threads(service), OtherPrograms(service), time.perf_counter()
    recorder = _play(service, streams, tokens)
    cores, foreign = threads.spent(), others.cores()
    notes = service.notes()
    per_stream = [[recorder.run.began + at for at in recorder.token_s[number]] for number in range(streams)]
    window = max(one[SKIPPED] for one in per_stream), min(one[-2] for one in per_stream)
    engine = notes["worker engine_thread"]
    return Run(
        notes,
        began,
        sorted(at for one in per_stream for at in one),
        window,
        threads.by_who(cores, engine),
        streams * tokens,
        foreign,
    )


def _play(service: Service, streams: int, tokens: int) -> Recorder:
    """Let all streams run from their first token to their last."""
    arrivals = [
        Arrival(0.0, PROMPT_TOKENS, tokens, [VOCABULARY[16 * i + j] for j in range(PROMPT_TOKENS)])
        for i in range(streams)
    ]
    return play_to_end(service.url(), arrivals, dialect=Dialect(precision=False))


class Threads:
    """The seconds that threads of the service and of this process were on a core."""

    def __init__(self, service: Service) -> None:
        names = {process.pid: name for name, process in service.processes.items()}
        self._names = names | {os.getpid(): "client"}
        self._before = self._read()

    def spent(self) -> dict[tuple[str, int], float]:
        """Return the seconds by process and thread since this object was made."""
        return {key: value - self._before.get(key, 0.0) for key, value in self._read().items()}

    def by_who(self, spent: dict[tuple[str, int], float], engine: int) -> dict[str, float]:
        """Sum by what a reader can name. engine: the id of the engine's thread."""
        found: dict[str, float] = {}
        loops = {pid for pid, name in self._names.items() if name == "w0"}
        for (name, thread), seconds in spent.items():
            who = name
            if name == "w0":
                who = "engine's thread" if thread == engine else "team"
                who = "worker's event loop" if thread in loops else who
            elif name in ("monitor", "controller"):
                who = "monitor, controller"
            found[who.removesuffix("0")] = found.get(who.removesuffix("0"), 0.0) + seconds
        return found

    def _read(self) -> dict[tuple[str, int], float]:
        return {
            (name, int(task.name)): int((task / "schedstat").read_text().split()[0]) / 1e9
            for pid, name in self._names.items()
            if psutil.pid_exists(pid)
            for task in Path(f"/proc/{pid}/task").iterdir()
        }


def parts_of(run: Run) -> Samples:
    """Return the seconds of each part of the engine's thread, for each step in the window.

    A part is all of the time from the end of the step before to the end of this one.
    """
    samples: Samples = {name: [] for name in (*PARTS, *OF_THESE, "token")}
    start, end = run.window
    for (before, earlier), (at, parts) in itertools.pairwise(run.notes["worker steps"]):
        if not (start <= before and at <= end and "forward" in parts):
            continue
        found = {name: parts.get(name, 0.0) for name in PARTS}
        inner = sum(found[name] for name in ("launch", "products", "attention", "rows", "lock", "watch"))
        found["prepare"] = parts["forward"] - inner
        known = sum(parts.get(name, 0.0) for name in ("schedule", "forward", "sample", "publish"))
        found["rest"] = parts["step"] - known
        token = at - before
        found["between"] = token - parts["step"]
        no_core = parts["no core"] - earlier["no core"]
        on_a_core = parts["on a core"] - earlier["on a core"]
        found |= {"token": token, "no core": no_core, "asleep": max(0.0, token - on_a_core - no_core)}
        for name, value in found.items():
            samples[name].append(value)
    if not samples["token"]:
        raise RuntimeError("no step was measured: ask for more --tokens")
    return samples


def way_of(run: Run) -> Samples:
    """Return the seconds that each token in the window waited on its way to the client.

    to the event loop: `worker.publish_ms` and a turn of the loop. Redis: XADD and XREAD, with both clients. A
    token leaves the gateway with the next event: alone it may be no whole character.
    """
    made, taken, read = (
        [at for at, _, count in run.notes[name] if at > run.began for _ in range(count)]
        for name in ("worker made", "worker taken", "gateway taken")
    )
    sent = [at for at, _, count in run.notes["gateway written"] if at > run.began for _ in range(count)]
    leaving = [bisect_left(sent, at) for at in read]
    start, end = run.window
    ways = [
        (*times, sent[event], run.event_s[event])
        for *times, event in zip(made, taken, read, leaving, strict=True)
        if event < len(sent) and start <= run.event_s[event] <= end
    ]
    samples = {name: [way[i + 1] - way[i] for way in ways] for i, name in enumerate(WAY)}
    return samples | {"whole way": [way[-1] - way[0] for way in ways]}


def cores_of(run: Run) -> dict[str, float]:
    """Return the seconds of a core for each token, by who takes them; those after a comma are part of others.

    The gateway's are split by what runs: its text is to decode and frame tokens.
    """
    found = {who: seconds / run.num_tokens for who, seconds in run.cores.items()}
    spent = {
        name: sum(cpu for at, cpu, _ in run.notes[name] if at > run.began) / run.num_tokens
        for name in ("gateway taken", "gateway flushed", "gateway written", "worker taken")
    }
    found["gateway, text"] = spent["gateway taken"] + spent["gateway flushed"] - spent["gateway written"]
    found["gateway, socket"] = spent["gateway written"]
    found["worker's event loop, outputs"] = spent["worker taken"]
    return dict(sorted(found.items()))


def report(run: Run, machine: dict[str, Any]) -> dict[str, Any]:
    parts, way = parts_of(run), way_of(run)
    weight_bytes = run.notes["worker weight_bytes"]
    floor_ms = weight_bytes / machine["memory_gb_s"] / 1e6
    say(f"{machine['processor']}, {machine['cores']} cores")
    rows = {
        "parts": _table("a token", parts, ("token", *PARTS, *OF_THESE)),
        "way": _table("the way of a token", way, (*WAY, "whole way")),
    }
    cores = {who: round(seconds * 1e3, 4) for who, seconds in cores_of(run).items()}
    say("\nms of a core for each token")
    for who, value in cores.items():
        say(f"{who:>28} {value:8.3f}")
    at = f"at {machine['memory_gb_s']} GB/s are {floor_ms:.2f} ms"
    say(f"floor: {weight_bytes / 1e6:.0f} MB {at}; {len(parts['token'])} steps")
    for line in busy_lines(run.foreign_cores):
        say(line)
    return rows | {
        "cores_ms": cores,
        "floor_ms": round(floor_ms, 3),
        "weight_mb": round(weight_bytes / 1e6, 1),
        "steps": len(parts["token"]),
        "foreign_cores": round(run.foreign_cores, 3),
    }


def _table(title: str, samples: Samples, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Print a table and return its numbers in milliseconds."""
    say(f"\n{title:>20}     mean   median      P95")
    rows = {}
    for name in names:
        ms = [1e3 * seconds for seconds in samples[name]]
        row = {"mean": fmean(ms), "median": statistics.median(ms), "p95": quantile(ms, 0.95) or 0.0}
        say(f"{name:>20}" + "".join(f" {value:8.3f}" for value in row.values()))
        rows[name] = {key: round(value, 4) for key, value in row.items()}
    return rows
