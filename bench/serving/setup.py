"""Preparation of `bench.serving`: the load, and the texts to expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from bench.common.results import say
from bench.serving.load import OUTPUT_SHARE, LoadArrival, LoadServed, ServingLoad, arrivals, replay
from bench.serving.service import ServingService, ServingWay

MODELS: Final = {False: ("50M", 268), True: ("4M", 22)}  # quick?: size, MB that hold it and KV
GROUP: Final = 4  # workers that a long request needs
LONG_SHARE: Final = 1.02  # share of half a group, so that a request needs all of it
SHORT_SHARE: Final = 0.4  # most of what a worker holds
LOAD: Final = 1.35  # load as in the model of eight GPUs: 2063 tokens/s for 2 x 767
NUM_SAMPLES: Final = 8  # short requests that are compared with the oracle, besides the first long one
NUM_SATURATING, SATURATING_PROMPT, SATURATING_OUTPUT = 24, 256, 29
PATIENCE_S: Final = 300.0  # patience with single measurements


def make_load(held: Mapping[int, int], long_output: int, *, is_quick: bool) -> ServingLoad:
    """Return a load with the longest short requests, and long ones that only TP4 holds.

    `held` is the number of tokens that one sequence may have, by degree. Raises RuntimeError if no length
    fits.
    """
    long_tokens = round(LONG_SHARE * held[GROUP // 2])
    say(f"tokens that one sequence may have, by degree: {held}; long requests have {long_tokens}")
    if not held[GROUP // 2] < long_tokens <= held[GROUP]:
        raise RuntimeError(f"a request of {long_tokens} tokens does not need TP{GROUP}: {held}")
    short_prompt, short_output = short_lengths(int(SHORT_SHARE * held[1]))
    lengths = (short_prompt, short_output, long_tokens - long_output, long_output)
    if is_quick:
        return ServingLoad(*lengths, seconds=75.0, warm_up_s=10.0, first_long_s=10.0, drain_s=10.0)
    return ServingLoad(*lengths, seconds=195.0, warm_up_s=15.0, first_long_s=15.0, drain_s=15.0)


def short_lengths(num_tokens: int) -> tuple[int, int]:
    """Return the lengths of prompt and output."""
    output = max(2, round(OUTPUT_SHARE * num_tokens))
    return num_tokens - output, output


def calibrate(
    service: ServingService, load: ServingLoad, short_tokens: int
) -> tuple[ServingLoad, dict[str, float]]:
    """Return the load, its short requests so long that it asks for LOAD times what a group gets done."""
    capacity = {}
    for tp in (1, GROUP):
        service.use(ServingWay("calibration", (tp,) * (service.num_workers // tp), is_static=True))
        capacity[f"TP{tp}"] = round(saturate(service), 1)
    most = load.short_prompt + load.short_output
    fitting = LOAD * capacity[f"TP{GROUP}"] - load.long_tokens / load.long_every_s
    length = short_tokens or round(min(max(fitting * 60 / load.short_per_minute, 64), most))
    prompt, output = short_lengths(length)
    load = replace(load, short_prompt=prompt, short_output=output)
    say(
        f"tokens/s: alone {capacity['TP1']:.0f}, in groups of {GROUP} {capacity[f'TP{GROUP}']:.0f}; short "
        f"requests are {load.short_prompt} + {load.short_output}, asked for is "
        f"{load.asked_tokens_per_s:.0f}: {load.asked_tokens_per_s / capacity['TP1']:.2f} and "
        f"{load.asked_tokens_per_s / capacity[f'TP{GROUP}']:.2f} of these"
    )
    return load, capacity


def saturate(service: ServingService) -> float:
    """Return the tokens per second, in and out, of many requests that come at once, after a warm-up."""
    rate = 0.0
    for seed in range(2):
        burst = ServingLoad(
            short_prompt=SATURATING_PROMPT,
            short_output=SATURATING_OUTPUT,
            long_prompt=0,
            long_output=0,
            seconds=1.0,
            warm_up_s=0.0,
            first_long_s=2.0,
            drain_s=0.0,
            short_per_minute=60.0 * NUM_SATURATING * (seed + 1) / 2,
        )
        script = [replace(one, at_s=0.0) for one in arrivals(burst, seed)]
        served = through(service, script)
        tokens = sum(one.tokens_between(0.0, PATIENCE_S) for one in served)
        rate = tokens / max(one.token_s[-1] for one in served)
    return rate


def oracle(service: ServingService, script: Sequence[LoadArrival]) -> dict[int, str]:
    """Return the texts of some requests by number, made by workers whose shape does not change meanwhile."""
    found: dict[int, str] = {}
    short = [one for one in script if not one.is_long][: 4 * NUM_SAMPLES : 4]
    long = next(one for one in script if one.is_long)
    num_groups = service.num_workers // GROUP
    for shapes, sample in (((GROUP,) * num_groups, [long]), ((1,) * service.num_workers, short)):
        service.use(ServingWay("oracle", shapes, is_static=True))
        served = through(service, [replace(one, at_s=0.0) for one in sample])
        found |= {one.arrival.number: one.text for one in served}
    return found


def through(service: ServingService, script: Sequence[LoadArrival]) -> list[LoadServed]:
    """Send requests and read all to their ends. Raises RuntimeError if one does not end."""
    served = replay(service.url(), script, PATIENCE_S)
    for one in served:
        if not one.is_whole:
            raise RuntimeError(
                f"request {one.arrival.number} did not end: {one.refused or one.error or 'it still ran'}"
            )
    return served
