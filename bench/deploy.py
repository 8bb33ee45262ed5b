"""Models deployed by intent on the real service, against configurations that are fixed.

    python -m bench.deploy [--quick] [--rounds 3] [--seconds 3]

Four workers that start without a model; the demo model and dummies of 30M and 60M parameters, registered and
measured by the service itself. For each intent (latency, cost, memory, GPU-hours, a limit of latency) the
service chooses; against it stand the largest degree of tensor parallelism, the most stages, and one worker,
all unquantised. Every configuration is deployed, asked real requests of the intent's lengths one at a time,
and retired, in turns for several rounds. What several intents choose is deployed by each of them in turn.

Bar: of each intent its own quantity is better than that of every fixed configuration, unless it chose that
very one. Memory is whole pages of weights on all workers and the KV of a request. The machine should be
otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.deploy_picture import draw
from bench.deploy_report import FIXED, Chosen, Run, intents_of, report, say_card
from bench.deploy_service import DeployService, running
from bench.offline import say
from bench.serving_setup import model_folder
from bus.deployments import Configuration, Intent
from tests.service import DEMO_MODEL

DUMMIES = ("30M", "60M")
NUM_WORKERS = 4
REQUEST = Intent(prompt_tokens=160, output_tokens=32)
LEAST_REQUESTS = 2  # of a configuration in a round
RESULT = Path(__file__).with_name("results") / "deploy.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the demo model, one round; a minute or two")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="for a configuration in a round")
    parser.add_argument("--dummies", nargs="*", default=DUMMIES, metavar="SIZE", help="30M 60M")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    began = time.perf_counter()
    with (
        models(() if args.quick else args.dummies) as folders,
        tempfile.TemporaryDirectory() as host,
        running(NUM_WORKERS, host) as service,
    ):
        profiling = {name: service.register(name, str(folder)) for name, folder in folders.items()}
        say(", ".join(f"{name} is measured ({took:.0f} s)" for name, took in profiling.items()))
        chosen = [one for name in folders for one in choices(service, name)]
        runs = [
            run
            for number in range(rounds)
            for name in folders
            for run in play(service, name, chosen, number, args.seconds)
        ]
    found = report(chosen, runs)
    found |= {"profiling_s": {name: round(took, 1) for name, took in profiling.items()}}
    say_card(found)
    result: dict[str, Any] = {"bench": "deploy", **found, "rounds": rounds, "seconds_each": args.seconds}
    result |= {"quick": args.quick, "seconds": round(time.perf_counter() - began, 1)}
    if not args.quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result) + "\n")
        draw(found, RESULT.with_suffix(".png"))
    say(json.dumps(result))
    return 0 if found["is_met"] else 1


@contextmanager
def models(dummies: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Folders by name, with a tokenizer, and without what was measured before."""
    with ExitStack() as stack:
        demo = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="instar-bench-"))) / "demo"
        demo.mkdir()
        for file in DEMO_MODEL.iterdir():
            if file.is_file():
                (demo / file.name).symlink_to(file)
        yield {"demo": demo} | {name: stack.enter_context(model_folder(name)) for name in dummies}


def choices(service: DeployService, model: str) -> list[Chosen]:
    """What the service would choose for each intent."""
    cheapest, fastest = (
        service.plan(model, replace(REQUEST, minimise=what))[0]["latency_s"]["value"]
        for what in ("cost", "latency")
    )
    found = []
    for name, intent in intents_of(REQUEST, cheapest, fastest).items():
        best = service.plan(model, intent)[0]
        found.append(Chosen(model, name, intent, Configuration(**best["configuration"]), best))
        say(f"{model}, {name}: {found[-1].label}, {best['latency_s']['value']:.3f} s expected")
    plain = service.plan(model, replace(REQUEST, tp=1, pp=1, precision="full"))[0]
    say(f"{model}, one worker unquantised: {plain['latency_s']['value']:.3f} s expected")
    return found


def play(
    service: DeployService, model: str, chosen: Sequence[Chosen], number: int, seconds: float
) -> Iterator[Run]:
    """Every configuration once; who begins changes from round to round."""
    wanted: dict[Configuration, Intent] = {
        fixed: replace(REQUEST, tp=fixed.tp, pp=fixed.pp, precision=fixed.precision)
        for fixed in FIXED.values()
    }
    for one in {one.configuration for one in chosen if one.model == model}:
        by = [each for each in chosen if each.model == model and each.configuration == one]
        wanted[one] = by[number % len(by)].intent
    order = sorted(wanted, key=lambda one: (one.num_devices, one.tp, one.precision))
    for one in order[number % len(order) :] + order[: number % len(order)]:
        yield measure(service, model, wanted[one], one, number, seconds)


def measure(
    service: DeployService,
    model: str,
    intent: Intent,
    configuration: Configuration,
    number: int,
    seconds: float,
) -> Run:
    """RuntimeError where the service deploys something else than it planned."""
    began = time.perf_counter()
    placed = service.deploy(model, intent)
    loaded_s = time.perf_counter() - began
    if placed.configuration != configuration:
        raise RuntimeError(f"{model} for {intent}: planned {configuration}, deployed {placed.configuration}")
    service.warm_up(model, intent)
    before, since = service.cpu_seconds(), time.perf_counter()
    took: list[float] = []
    while len(took) < LEAST_REQUESTS or sum(took) < seconds:
        took.append(service.request(model, intent, seed=len(took)))
    wall_s, after = time.perf_counter() - since, service.cpu_seconds()
    memory = service.memory_bytes(placed, intent)
    service.retire(placed.id)
    run = Run(
        model=model,
        configuration=configuration,
        round=number,
        seconds=took,
        memory_bytes=memory,
        others_cores=(after.others - before.others) / wall_s,
        loaded_s=loaded_s,
    )
    say(f"round {number}, {run}")
    return run


if __name__ == "__main__":
    sys.exit(main())
