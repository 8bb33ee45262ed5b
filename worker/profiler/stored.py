"""Profiles of fingerprints as files beside their models: what was measured once is not measured again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from bus.deployments import Configuration, MemorySample, Profile
from worker.model.quantized_sets import FOLDER, writing_whole
from worker.profiler.fingerprint import CutPlan
from worker.profiler.grid import Point


def program_version() -> str:
    try:
        return version("instar")
    except PackageNotFoundError:
        return "unknown"


def kind_of(device: torch.device | str) -> str:
    """Return the kind of a device, "cpu" or a GPU's name. Devices of one kind measure alike."""
    device = torch.device(device)
    return str(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)


def profile_path(folder: Path, device: str, program: str) -> Path:
    """Return the path of a profile, beside the model's sets and orders. device: its kind."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device}-{program}")
    return folder / FOLDER / f"fingerprint-{plain}.json"


def read_stored(path: Path) -> Profile | None:
    """Read a profile; None if there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except (OSError, ValueError):
        return None


def write_stored(path: Path, profile: Profile) -> None:
    """Write a profile whole or not at all. Raises OSError."""
    with writing_whole(path) as unfinished:
        unfinished.write_text(json.dumps(asdict(profile), indent=1) + "\n")


def is_of(profile: Profile, digest: str, device: str, program: str) -> bool:
    """Return True if the profile is of this checkpoint, kind of device and program."""
    return (profile.digest, profile.device, profile.version) == (digest, device, program)


def points_in(profile: Profile) -> set[Point]:
    """Return the points that a profile holds."""
    return {
        Point(one.configuration.precision, one.prompt_tokens, one.batch_size, one.configuration.tp)
        for one in profile.latency
    }


STAGES = 2


def with_shapes(profile: Profile, plan: CutPlan) -> Profile:
    """Add the memory of every degree, and of two stages, computed from the layout (iServe §5.2).

    Samples whose activations were measured stay as they are.
    """
    measured = [one for one in profile.memory if one.activation_bytes is not None]
    known = {(one.num_layers, one.configuration) for one in measured}
    others = [one for one in _laid_out(plan) if (one.num_layers, one.configuration) not in known]
    return replace(profile, memory=[*measured, *others], degrees=plan.degrees)


def _laid_out(plan: CutPlan) -> Iterator[MemorySample]:
    for precision in plan.all_precisions:
        for depth in plan.depths:
            for tp in plan.degrees[1:]:
                yield MemorySample(
                    num_layers=depth,
                    configuration=Configuration(tp=tp, precision=precision),
                    weight_bytes=plan.weight_bytes(depth, precision, tp),
                )
            if depth >= STAGES:  # stages repeat nothing: only the first has the ends
                yield MemorySample(
                    num_layers=depth,
                    configuration=Configuration(pp=STAGES, precision=precision),
                    weight_bytes=plan.weight_bytes(depth, precision),
                )
