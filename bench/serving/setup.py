"""What is known before a way of the serving benchmark runs: the model, the load, the texts to be expected."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.common.results import DEMO
from bench.serving.load import OUTPUT_SHARE, Arrival, Load, Served, arrivals, replay, say
from bench.serving.service import ServingService, Way

TOKENIZER: Final = DEMO
MODELS: Final = {False: ("50M", 268), True: ("4M", 22)}  # quick?: size, MB that hold it and KV
MAX_LEN: Final = 16384
GROUP: Final = 4  # workers that a long request needs
LONG_SHARE: Final = 1.02  # of what half a group holds, so that it needs all of it
SHORT_SHARE: Final = 0.4  # of what a worker holds, at most
LOAD: Final = 1.35  # as in the model of eight GPUs: 2063 tokens/s are asked of two groups of 767 each
NUM_SAMPLES: Final = 8  # short requests that are compared with the oracle, beside the first long one
NUM_SATURATING, SATURATING_PROMPT, SATURATING_OUTPUT = 24, 256, 29
PATIENCE_S: Final = 300.0  # for what is measured or asked alone


def make_load(held: Mapping[int, int], long_output: int, *, is_quick: bool) -> Load:
    """With the longest short requests, and long ones that only TP4 holds. held: tokens of one sequence, by
    degree. Raises RuntimeError where there are none such."""
    long_tokens = round(LONG_SHARE * held[GROUP // 2])
    say(f"tokens that one sequence may have, by degree: {held}; long requests have {long_tokens}")
    if not held[GROUP // 2] < long_tokens <= held[GROUP]:
        raise RuntimeError(f"no request of {long_tokens} tokens is one for TP{GROUP} alone: {held}")
    short_prompt, short_output = short_lengths(int(SHORT_SHARE * held[1]))
    lengths = (short_prompt, short_output, long_tokens - long_output, long_output)
    if is_quick:
        return Load(*lengths, seconds=75.0, warm_up_s=10.0, first_long_s=10.0, drain_s=10.0)
    return Load(*lengths, seconds=195.0, warm_up_s=15.0, first_long_s=15.0, drain_s=15.0)


def short_lengths(num_tokens: int) -> tuple[int, int]:
    """Prompt and output."""
    output = max(2, round(OUTPUT_SHARE * num_tokens))
    return num_tokens - output, output


@contextmanager
def model_folder(size: str) -> Iterator[Path]:
    from bench.common.dummy_model import saved_model  # brings torch

    with saved_model(size, MAX_LEN) as folder:
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(TOKENIZER / name, folder)
        yield folder


def calibrate(service: ServingService, load: Load, short_tokens: int) -> tuple[Load, dict[str, float]]:
    """The load with short requests of a length that asks for LOAD times what a group gets done."""
    capacity = {}
    for tp in (1, GROUP):
        service.use(Way("calibration", (tp,) * (service.num_workers // tp), is_static=True))
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
    """Tokens a second, prompts and outputs, of many requests that come at once. Twice: the first warms up."""
    rate = 0.0
    for seed in range(2):
        burst = Load(
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


def oracle(service: ServingService, script: Sequence[Arrival]) -> dict[int, str]:
    """Texts of some requests by their numbers, of workers whose shape does not change meanwhile."""
    found: dict[int, str] = {}
    short = [one for one in script if not one.is_long][: 4 * NUM_SAMPLES : 4]
    long = next(one for one in script if one.is_long)
    num_groups = service.num_workers // GROUP
    for shapes, sample in (((GROUP,) * num_groups, [long]), ((1,) * service.num_workers, short)):
        service.use(Way("oracle", shapes, is_static=True))
        served = through(service, [replace(one, at_s=0.0) for one in sample])
        found |= {one.arrival.number: one.text for one in served}
    return found


def through(service: ServingService, script: Sequence[Arrival]) -> list[Served]:
    """RuntimeError where one of them did not get to its end."""
    served = replay(service.url(), script, PATIENCE_S, lambda *_: None)
    for one in served:
        if not one.is_whole:
            raise RuntimeError(
                f"request {one.arrival.number}: {one.refused or one.error or 'not at its end'}"
            )
    return served
