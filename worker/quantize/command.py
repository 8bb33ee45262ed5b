"""What the options of `instar quantize` ask for, done."""

from __future__ import annotations

import argparse

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from worker.model.config import read_config
from worker.model.errors import ModelError
from worker.model.sources import Checkpoint
from worker.quantize.calibration import read_calibration
from worker.quantize.make import Maker
from worker.quantize.progress import say
from worker.quantize.ready import take_over
from worker.quantize.sets import Method


def quantize(args: argparse.Namespace) -> None:
    """Raises ModelError, OSError."""
    config = read_config(args.model)
    checkpoint = Checkpoint(config.folder)
    if args.ready:
        path = take_over(config, checkpoint, args.ready, args.group)
        say(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
        return
    methods: list[Method] = ["awq", "rtn"] if args.method == "both" else [args.method]
    calibration = None
    if "awq" in methods:
        calibration = read_calibration(config, args.calibration, args.windows, args.window_tokens)
        windows, tokens = calibration.tokens.shape
        say(f"calibration: {windows} windows of {tokens} tokens of {calibration.source}")
    maker = Maker(config, checkpoint, calibration, device_of(args.device))
    targets = maker.targets(methods, args.bits, args.group)
    for target in [] if args.again else [t for t in targets if t.is_made]:
        say(f"{target.path}: is there already, made the same way (--again makes it anew)")
        targets.remove(target)
    if targets:
        maker.make(targets)


def device_of(name: str) -> torch.device:
    """Raises ModelError."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} cannot be used: {error}".splitlines()[0]) from error
    return device
