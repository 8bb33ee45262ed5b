"""The cost of profiling a model for the requests that the same worker serves.

    python -m bench.profiling [--quick] [--rounds 4] [--seconds 25] [--share 0.6] [--size 30M]

The real service, one worker with the demo model, and seeded arrivals at a share of what it can do at most. A
dummy is profiled on that worker, as if no other were idle. The same arrivals are played without a profile and
beside one, by turns: beside the beginning of a profile, which reads the cut and makes its precisions, and
beside its rounds of dummy requests. Then one profile is measured to its end beside that load, or until
--patience is over; how long one takes on the idle worker is measured first.

Profiles are ordered at the worker itself, as the controller does: so they can be cancelled when a window
ends. Nothing morphs meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from bench.common.dummy_model import model_folder
from bench.common.load import play_to_end, saturate
from bench.common.results import conclude, parser, say
from bench.common.service import OtherPrograms
from bench.morph.load import MEAN_OUTPUT_TOKENS, Script, saturating
from bench.profiling.report import LOADING, MEASURING, WHOLE, WITHOUT, ProfilingWindow, report, say_card
from bench.profiling.service import ProfileService

NUM_SATURATING = 192  # requests at once, more than end while the worker is saturated
ROUNDS_S = 120.0  # until a profile on the idle worker comes to its rounds
PIECE_S = 30.0  # length of the load beside a whole profile


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="two short windows; a minute")
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--seconds", type=float, default=25.0, help="of a window")
    options.add_argument("--share", type=float, default=0.6, help="of what the worker can do at most")
    options.add_argument("--size", default="30M", help="of the dummy that is profiled")
    options.add_argument("--patience", type=float, default=300.0, help="seconds for the whole profile")
    args = options.parse_args()
    began = time.perf_counter()
    rounds, seconds, size = (1, 8.0, "4M") if args.quick else (args.rounds, args.seconds, args.size)
    with model_folder(size) as folder, ProfileService(folder) as service:
        rate = calibrate(service, args.share, 5.0 if args.quick else 10.0)
        idle_s = 0.0 if args.quick else alone(service, args.patience)
        windows = [one for number in range(rounds) for one in by_turns(service, number, rate, seconds)]
        profiling: dict[str, Any] = {"idle_s": idle_s, "limit_s": args.patience}
        if not args.quick:
            profiling |= to_its_end(service, rate, args.patience, windows)
    found = report(windows) | {"profiling": {"loaded_s": None, "progress": ""} | profiling}
    say_card(found)
    result: dict[str, Any] = {"bench": "profile_load", **found, "rate": rate, "share": args.share}
    result |= {"profiled": size, "quick": args.quick, "rounds": rounds, "window_s": seconds}
    result |= {"seconds": round(time.perf_counter() - began, 1)}
    return conclude(result, is_kept=not args.quick)


def calibrate(service: ProfileService, share: float, seconds: float) -> float:
    """Return the requests per second that are the given share of what the worker can do."""
    requests = saturating(NUM_SATURATING)
    saturate(service.url(), requests, seconds / 2)  # warms up
    tokens = saturate(service.url(), requests, seconds)
    rate = share * tokens / MEAN_OUTPUT_TOKENS
    say(f"the worker can do {tokens:.0f} tokens/s; asked for is {share:.0%} of that, {rate:.2f} requests/s")
    return round(rate, 3)


def alone(service: ProfileService, patience_s: float) -> float:
    """Return the seconds of a profile on the idle worker."""
    service.settle()
    began = time.perf_counter()
    service.measure()
    service.wait_profiled(patience_s)
    took = time.perf_counter() - began
    service.forget()
    say(f"profiled on the idle worker in {took:.0f} s")
    return round(took, 1)


def by_turns(service: ProfileService, number: int, rate: float, seconds: float) -> Iterator[ProfilingWindow]:
    """Play a window without a profile and one beside a profile; which comes first changes by the number.

    What part of the profile runs beside it changes too.
    """
    beside = (MEASURING, LOADING)[number % 2]
    order = (WITHOUT, beside) if number // 2 % 2 == 0 else (beside, WITHOUT)
    for kind in order:
        service.settle()
        if kind != WITHOUT:
            service.measure()
        if kind == MEASURING:
            service.wait_measuring(ROUNDS_S)
        window = play(service, kind, number, rate, seconds)
        if kind != WITHOUT:
            service.cancel()
        say(str(window))
        yield window


def to_its_end(
    service: ProfileService, rate: float, patience_s: float, windows: list[ProfilingWindow]
) -> dict[str, Any]:
    """Measure a whole profile beside the load, and add to the windows.

    `loaded_s` is None if it did not end.
    """
    service.settle()
    began = time.perf_counter()
    service.measure()
    number = 0
    while not service.is_profiled() and time.perf_counter() - began < patience_s:
        windows.append(play(service, WHOLE, 100 + number, rate, PIECE_S))
        say(f"{windows[-1]}; {service.progress()}")
        number += 1
    if (profiled_s := service.profiled_s()) is not None:
        return {"loaded_s": round(profiled_s, 1), "progress": "measured"}
    progress = service.progress()
    service.cancel()
    return {"loaded_s": None, "progress": progress}


def play(service: ProfileService, beside: str, number: int, rate: float, seconds: float) -> ProfilingWindow:
    """Play the script of a number: the same arrivals for the same number."""
    script = Script(calm_s=0.0, burst_s=seconds, calm_again_s=0.0, calm_rate=0.0, burst_rate=rate)
    others = OtherPrograms(service)
    outcomes = play_to_end(service.url(), script.arrivals(seed=number)).run.outcomes
    return ProfilingWindow(beside, number, outcomes, others.cores())
