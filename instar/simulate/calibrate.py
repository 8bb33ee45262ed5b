"""`instar simulate --calibrate`: from recorded runs to a calibration file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bus.precisions import Precision
from bus.settings import WorkerSettings
from instar.client import settings_of
from instar.errors import InputError
from instar.replay import files
from instar.replay.files import RunFile
from instar.simulate.calibration import EngineCalibration, EngineLimits, parse
from instar.simulate.fitting import fit
from worker.model.config import ModelError, read_config
from worker.morph.losses import Measured
from worker.shape.layer_order import half_losses


def calibrate(args: argparse.Namespace) -> int:
    """Fit a calibration to recorded runs and write it. Raises InputError."""
    if args.out is None:
        raise InputError("--calibrate needs --out FILE, for the calibration")
    if args.out.exists():
        raise InputError(f"--out {args.out}: is there already; name another file")
    runs = [files.read(folder) for folder in args.calibrate]
    found = calibration_of(runs, settings_of(args).worker, args.profiles)
    text = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    parse(text, str(args.out))  # check: the written file can be read
    try:
        args.out.write_bytes(text)
    except OSError as error:
        raise InputError(f"--out {args.out}: cannot be written: {error.strerror}") from error
    covers = found.covers
    sys.stdout.write(
        f"wrote {args.out}: {found.model}, from {found.source}; median error of the times of steps "
        f"{found.error:.0%}; covers {covers.running} sequences at once, prompts of "
        f"{covers.prompt_tokens} tokens, layers in {', '.join(covers.precisions)}\n"
    )
    return 0


def calibration_of(
    runs: Sequence[RunFile], worker: WorkerSettings, profiles: Path | None
) -> EngineCalibration:
    """Fit a calibration to runs of workers with these settings. Raises InputError.

    What a run says of its own limits counts; for one that does not, workers on a CPU are assumed.

    profiles: the model's folder, for the losses of its halves; without it they are assumed.
    """
    facts: dict[str, Any] = next(
        (one for run in runs for one in run.observed.get("instances", {}).values()), {}
    )
    worker = worker.in_force("cpu")
    limits = EngineLimits(
        max_model_len=facts.get("max_model_len") or worker.max_model_len or 1,
        max_num_seqs=facts.get("max_num_seqs") or worker.max_num_seqs,
        max_num_batched_tokens=facts.get("max_num_batched_tokens") or worker.max_num_batched_tokens,
        block_tokens=facts.get("block_tokens") or worker.block_tokens,
    )
    found = fit(runs, limits)
    morph = msgspec.structs.replace(found.morph, share=worker.morph_share / 2)
    losses = losses_of(profiles, found.variants) if profiles else {}
    return msgspec.structs.replace(found, morph=morph, losses=losses)


def losses_of(folder: Path, variants: Sequence[Precision]) -> Measured:
    """Return the losses by the profiles in a model's folder, as a worker would. Raises InputError."""
    try:
        found = half_losses(read_config(folder), [name for name in variants if name != "full"])
    except ModelError as error:
        raise InputError(f"--profiles {folder}: {error}") from error
    if not found:
        raise InputError(
            f"--profiles {folder}: has no profile with the losses of halves; make one with `instar profile`"
        )
    return found
