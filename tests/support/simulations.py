"""A small calibration, and clusters of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from bus.policy import Mode, Policy
from instar.replay.schemas import Arrival
from instar.replay.traces import gamma_burst
from instar.simulate.calibration import (
    VERSION,
    CalibratedMemory,
    Coverage,
    EngineCalibration,
    EngineLimits,
    MorphCosts,
    StepCosts,
)
from instar.simulate.cluster import SimulatedCluster

# About models/demo: a page is a block of one layer.
SMALL = EngineCalibration(
    version=VERSION,
    model="small",
    source="a test",
    num_layers=8,
    order=[1, 3, 2, 4, 5, 6, 7, 0],
    limits=EngineLimits(max_model_len=512, max_num_seqs=64, max_num_batched_tokens=512, block_tokens=16),
    memory=CalibratedMemory(
        page_bytes=16384,
        kv_pages=376,
        kv_blocks=47,
        spare_pages=7,
        layer_pages={"full": 178, "int8": 48, "int4": 26},
        attention_pages={"full": 49, "int8": 13, "int4": 7},
    ),
    step=StepCosts(
        fixed_s=0.0015,
        prompt_token_s=0.00013,
        decode_s=0.0002,
        kv_token_s=1e-7,
    ),
    below_full={
        "int8": StepCosts(fixed_s=0.0018, prompt_token_s=0.000143, decode_s=0.00024, kv_token_s=1e-7),
        "int4": StepCosts(fixed_s=0.0030, prompt_token_s=0.000195, decode_s=0.0004, kv_token_s=1e-7),
    },
    morph=MorphCosts(half_s=0.004, byte_s=3e-9, share=0.02),
    covers=Coverage(running=64, prompt_tokens=512, precisions=["full", "int8", "int4"]),
    transit_s=0.003,
)


def with_limits(calibration: EngineCalibration = SMALL, **limits: Any) -> EngineCalibration:
    return msgspec.structs.replace(calibration, limits=msgspec.structs.replace(calibration.limits, **limits))


def cluster(
    num_workers: int = 1,
    mode: Mode = "default",
    calibration: EngineCalibration = SMALL,
    **options: Any,
) -> SimulatedCluster:
    return SimulatedCluster(calibration, num_workers, Policy(mode=mode), **options)


def burst(
    rate: float, seconds: float = 20.0, prompt: int = 100, output: int = 50, seed: int = 1
) -> list[Arrival]:
    """Requests of at most 256 tokens each way, with a coefficient of variation of 2.5."""
    source = f"gamma:{rate}:2.5:{seconds}:{prompt}:{output}"
    return [
        Arrival(one.at_s, min(one.prompt_tokens, 256), min(one.output_tokens, 256))
        for one in gamma_burst(source, seed)
    ]


def evenly(rate: float, seconds: float, prompt: int = 100, output: int = 50) -> Iterable[Arrival]:
    return [Arrival(number / rate, prompt, output) for number in range(round(rate * seconds))]
