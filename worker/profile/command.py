"""What the options of `instar profile` ask for, done."""

from __future__ import annotations

import argparse

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
from dataclasses import asdict, replace
from pathlib import Path

import torch

from worker.model.config import read_config
from worker.model.errors import ModelError
from worker.model.sources import Checkpoint
from worker.profile.greedy import Profiler
from worker.profile.order import Profile, profile_path, read_profile, write_profile
from worker.profile.scores import Metric, Weights
from worker.quantize.calibration import read_calibration
from worker.quantize.command import device_of
from worker.quantize.decoder import load_ends, load_layer
from worker.quantize.fingerprint import model_fingerprint
from worker.quantize.progress import Progress, say
from worker.quantize.source import QuantizedLayers


def profile(args: argparse.Namespace) -> None:
    """Raises ModelError, OSError."""
    config = read_config(args.model)
    checkpoint = Checkpoint(config.folder)
    device = device_of(args.device)
    calibration = read_calibration(config, args.calibration, args.windows, args.window_tokens)
    fingerprint = model_fingerprint(config, checkpoint)
    dtype = torch.float32 if device.type == "cpu" else config.dtype
    quantised = QuantizedLayers(
        config,
        checkpoint,
        precision=args.precision,
        method=args.method,
        model=fingerprint,
        dtype=dtype,
        device=device,
    )
    num_windows, num_tokens = calibration.tokens.shape
    say(
        f"{args.precision} {quantised.method}; calibration: {num_windows} windows of {num_tokens} tokens of"
        f" {calibration.source}"
    )
    progress: Progress | None = None

    def advance() -> None:
        if progress is not None:
            progress.advance()

    metric: Metric = args.metric
    path = profile_path(config.folder, args.precision)
    wished = Profile(
        model=fingerprint,
        precision=args.precision,
        method=quantised.method,
        metric=metric,
        weights=list(args.weights),
        calibration=calibration.digest,
        windows=[num_windows, num_tokens],
        sequence=[],
        scores={},
        seconds=0.0,
    )
    with torch.inference_mode():
        profiler = Profiler(
            load_ends(config, checkpoint, dtype, device),
            [load_layer(config, checkpoint, i, dtype, device) for i in range(config.num_layers)],
            quantised,
            calibration.tokens.to(device),
            metric,
        )
        if made := _without_perplexity(path, wished, config.num_layers):
            say(f"{path}: the same order without perplexities: measures these alone")
            profiler.follow(made.sequence)
        else:
            progress = Progress("profile", profiler.num_trials, "trials")
            sequence, scores = profiler.sequence(Weights(*args.weights), advance)
            made = replace(
                wished, sequence=sequence, scores=asdict(scores), seconds=round(progress.seconds, 1)
            )
    made = replace(made, perplexity=[round(each, 4) for each in profiler.perplexity])
    write_profile(path, made)
    say(f"{path}: swap layers in the order {', '.join(map(str, made.sequence))}; {_lost(made)}")


def _without_perplexity(path: Path, wished: Profile, num_layers: int) -> Profile | None:
    """What is stored, if it is what is asked for but for perplexities: its trials need not be run again."""
    try:
        found = read_profile(path, model=wished.model, num_layers=num_layers)
    except ModelError:
        return None
    same = replace(found, sequence=[], scores={}, seconds=0.0) == wished
    return found if same else None


def _lost(made: Profile) -> str:
    return f"all of them in {made.precision} lose {made.loss or 0.0:.2%} of perplexity"
