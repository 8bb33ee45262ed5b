"""Models deployed by intent on the real service, against configurations that are fixed.

    python -m bench.deploy [--quick] [--rounds 2] [--seconds 4] [--models demo 30M 60M]

Four workers that start without a model; the demo model and dummies of 30M and 60M parameters, registered and
measured by the service itself. For each intent (latency, cost, memory, GPU-hours, a limit of latency) the
service chooses; against it stand the largest degree of tensor parallelism, the most stages, and one worker,
all unquantised. As many configurations as there are workers for are deployed side by side, each under a name
of its own, and asked in turn, one request of the intent's lengths at a time: what disturbs the machine
disturbs them alike. Then they are retired, and the others follow; in the next round the other way round.
What several intents choose is deployed by each of them in turn.

Bar: of each intent its own quantity is better than that of every fixed configuration, unless it chose that
very one. Memory is whole pages of weights on all workers and the KV of a request. The machine should be
otherwise idle.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from httpx import HTTPError

from bench.common.dummy_model import model_folder
from bench.common.results import DEMO, RESULTS, conclude, parser, say
from bench.common.service import OtherPrograms
from bench.deploy.plot import draw
from bench.deploy.report import FIXED, NUM_WORKERS, Chosen, DeployRun, batches, intents_of, report, say_card
from bench.deploy.service import DeployService, Placed
from bus.deployments import Configuration, Estimate, Intent
from bus.precisions import PRECISIONS
from controller.planning.intent import preference

MODELS = ("demo", "30M", "60M")
REQUEST = Intent(prompt_tokens=160, output_tokens=32)
LEAST_REQUESTS = 3  # requests of a configuration in a round


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="the demo model, one round; a minute or two")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--seconds", type=float, default=4.0, help="for a configuration in a round")
    options.add_argument(
        "--models", nargs="+", default=MODELS, metavar="NAME", help="demo, or a dummy's size"
    )
    args = options.parse_args()
    rounds = 1 if args.quick else args.rounds
    began = time.perf_counter()
    with (
        models(MODELS[:1] if args.quick else args.models) as folders,
        tempfile.TemporaryDirectory() as host,
        DeployService(NUM_WORKERS, host) as service,
    ):
        profiling = {name: service.register(name, str(folder)) for name, folder in folders.items()}
        say(", ".join(f"{name} is measured ({took:.0f} s)" for name, took in profiling.items()))
        for model, folder in folders.items():
            for name in names_of(model)[1:]:  # the same folder is not measured again
                service.register(name, str(folder))
        chosen = [one for name in folders for one in choices(service, name)]
        runs, failure = play_all(service, list(folders), chosen, rounds, args.seconds)
    found = report(*complete(chosen, runs)) | {"failure": failure}
    found |= {"profiling_s": {name: round(took, 1) for name, took in profiling.items()}}
    say_card(found)
    result: dict[str, Any] = {"bench": "deploy", **found, "rounds": rounds, "seconds_each": args.seconds}
    result |= {"quick": args.quick, "seconds": round(time.perf_counter() - began, 1)}
    is_kept = not args.quick and tuple(args.models) == MODELS
    if is_kept:
        draw(found, RESULTS / "deploy.png")
    status = conclude(result, is_kept=is_kept)
    return status if found["is_met"] and not failure else 1


@contextmanager
def models(names: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Make folders by name, with a tokenizer and without what was measured before."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(demo_folder() if name == "demo" else model_folder(name))
            for name in names
        }


@contextmanager
def demo_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        for file in DEMO.iterdir():
            if file.is_file():
                (Path(folder) / file.name).symlink_to(file)
        yield Path(folder)


def best_of(service: DeployService, model: str, intent: Intent) -> dict[str, Any]:
    """Return the plan's best row in any precision: what random weights lose is not known."""
    rows = [service.plan(model, replace(intent, precision=precision))[0] for precision in PRECISIONS]
    return min(
        rows, key=lambda row: (bool(row["refusal"]), *preference(msgspec.convert(row, Estimate), intent))
    )


def choices(service: DeployService, model: str) -> list[Chosen]:
    """Return what the service would choose for each intent."""
    cheapest, fastest = (
        best_of(service, model, replace(REQUEST, minimise=what))["latency_s"]["value"]
        for what in ("cost", "latency")
    )
    found = []
    for name, intent in intents_of(REQUEST, cheapest, fastest).items():
        best = best_of(service, model, intent)
        found.append(Chosen(model, name, intent, Configuration(**best["configuration"]), best))
        say(f"{model}, {name}: {found[-1].label}, {best['latency_s']['value']:.3f} s expected")
    plain = service.plan(model, replace(REQUEST, tp=1, pp=1, precision="full"))[0]
    say(f"{model}, one worker unquantised: {plain['latency_s']['value']:.3f} s expected")
    return found


def play_all(
    service: DeployService, models: Sequence[str], chosen: Sequence[Chosen], rounds: int, seconds: float
) -> tuple[list[DeployRun], str]:
    """Return the runs, and what ended them early, if anything."""
    runs: list[DeployRun] = []
    try:
        for number in range(rounds):
            for name in models:
                runs += play(service, name, chosen, number, seconds)
    except (RuntimeError, AssertionError, HTTPError) as problem:
        say(f"{service.logs()}\n{problem!r}")
        return runs, repr(problem)
    return runs, ""


def complete(chosen: Sequence[Chosen], runs: Sequence[DeployRun]) -> tuple[list[Chosen], list[DeployRun]]:
    """Keep the models whose every configuration was measured. Raises RuntimeError if there is none."""
    wanted = {one.model: set(FIXED.values()) for one in chosen}
    for one in chosen:
        wanted[one.model].add(one.configuration)
    for run in runs:
        wanted[run.model].discard(run.configuration)
    whole = [model for model, missing in wanted.items() if not missing]
    if not whole:
        raise RuntimeError("no model was measured in all of its configurations")
    return [one for one in chosen if one.model in whole], [run for run in runs if run.model in whole]


def play(
    service: DeployService, model: str, chosen: Sequence[Chosen], number: int, seconds: float
) -> Iterator[DeployRun]:
    """Measure every configuration once; which comes first changes from round to round."""
    wanted: dict[Configuration, Intent] = {
        fixed: replace(REQUEST, tp=fixed.tp, pp=fixed.pp, precision=fixed.precision)
        for fixed in FIXED.values()
    }
    for one in {one.configuration for one in chosen if one.model == model}:
        by = [each for each in chosen if each.model == model and each.configuration == one]
        wanted[one] = by[number % len(by)].intent
    together = batches(wanted)
    for batch in reversed(together) if number % 2 else together:
        yield from measure(service, model, {one: wanted[one] for one in batch}, number, seconds)


def names_of(model: str) -> list[str]:
    """Return the names under which a model is deployed side by side with itself."""
    return [model, *(f"{model}-{number}" for number in range(2, NUM_WORKERS + 1))]


def measure(
    service: DeployService, model: str, wanted: Mapping[Configuration, Intent], number: int, seconds: float
) -> list[DeployRun]:
    """Measure configurations side by side.

    Raises RuntimeError if the service does not deploy what it planned.
    """
    placed: dict[Configuration, Placed] = {}
    loaded_s: dict[Configuration, float] = {}
    weight_bytes: dict[Configuration, int] = {}
    service.wait_empty()
    for name, (configuration, intent) in zip(names_of(model), wanted.items(), strict=False):
        began = time.perf_counter()
        placed[configuration] = service.deploy(name, intent)
        loaded_s[configuration] = time.perf_counter() - began
        if (found := placed[configuration].configuration) != configuration:
            raise RuntimeError(f"{model} for {intent}: planned {configuration}, deployed {found}")
        service.warm_up(name, intent)
        weight_bytes[configuration] = service.weight_bytes() - sum(weight_bytes.values())
    kv_bytes = service.kv_bytes(REQUEST)
    others = OtherPrograms(service)
    took = by_turns(service, placed, wanted, seconds)
    others_cores = others.cores()
    for each in placed.values():
        service.retire(each.id)
    runs = [
        DeployRun(
            model=model,
            configuration=one,
            round=number,
            seconds=took[one],
            memory_bytes=weight_bytes[one] + kv_bytes,
            others_cores=others_cores,
            loaded_s=loaded_s[one],
        )
        for one in placed
    ]
    for run in runs:
        say(f"round {number}, {run}")
    return runs


def by_turns(
    service: DeployService,
    placed: Mapping[Configuration, Placed],
    wanted: Mapping[Configuration, Intent],
    seconds: float,
) -> dict[Configuration, list[float]]:
    """Return the seconds of each request; all get the same, for `seconds` each on average.

    Which is asked first changes with every turn.
    """
    took: dict[Configuration, list[float]] = {one: [] for one in placed}
    order, ends = list(placed), time.perf_counter() + seconds * len(placed)
    turn = 0
    while turn < LEAST_REQUESTS or time.perf_counter() < ends:
        for one in order:
            took[one].append(service.request(placed[one].model, wanted[one], seed=turn))
        order = [*order[1:], order[0]]
        turn += 1
    return took
