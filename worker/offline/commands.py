"""The commands `instar quantize`, `instar profile` and `instar convert`."""

from __future__ import annotations

import argparse

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from bus.precisions import KV_PRECISIONS
from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.layer import Layer
from worker.model.quantized_sets import Method
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.offline.against import measure_against
from worker.offline.bin_checkpoint import convert_bin
from worker.offline.calibration import Calibration, read_calibration
from worker.offline.importance import LayerRanking, Metric, ScoreWeights
from worker.offline.kv_loss import measure_kv
from worker.offline.layerwise import LayerwiseModel
from worker.offline.progress import ProgressLine, say
from worker.offline.quantizer import Quantizer
from worker.offline.ready_checkpoint import convert_checkpoint
from worker.shape.base_loss import base_loss_path, write_base_loss
from worker.shape.host_images import find_matrices
from worker.shape.kv_profile import KVProfile, kv_profile_path, read_kv_profile, write_kv_profile
from worker.shape.layer_order import OrderProfile, profile_path, read_profile, write_profile


def quantize(args: argparse.Namespace) -> None:
    """Run `instar quantize`. Raises ModelError, OSError."""
    config = _full_config(args.model)
    checkpoint = open_checkpoint(config)
    if args.ready:
        path = convert_checkpoint(config, checkpoint, args.ready, args.group)
        say(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
        return
    methods: list[Method] = ["awq", "rtn"] if args.method == "both" else [args.method]
    calibration = None
    if "awq" in methods:
        calibration = read_calibration(config, args.calibration, args.windows, args.window_tokens)
        say(str(calibration))
    quantizer = Quantizer(config, checkpoint, calibration, device_of(args.device))
    targets = quantizer.targets(methods, args.bits, args.group)
    for target in [] if args.again else [t for t in targets if t.is_made]:
        say(f"{target.path}: exists already, made with the same options (--again makes it again)")
        targets.remove(target)
    if targets:
        quantizer.make(targets)


def _full_config(folder: Path) -> ModelConfig:
    """Read the config of a model in full precision. Raises ModelError."""
    config = read_config(folder)
    if config.ready:
        raise ModelError(
            f"{folder}: its layers are in {config.fixed_precision} alone ({config.ready.method}), which is"
            " served as it is; only a folder in full precision has layers to quantise and to measure"
        )
    return config


def convert(args: argparse.Namespace) -> None:
    """Run `instar convert`. Raises ModelError, OSError."""
    source, target = args.source.expanduser().resolve(), args.target.expanduser().resolve()
    if source.is_file():
        if find_spec("gguf") is None:
            raise ModelError(f"{source}: GGUF files are read by the package gguf: pip install gguf")
        from worker.offline.gguf_checkpoint import convert_gguf

        convert_gguf(source, target)
    else:
        convert_bin(source, target)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    say(f"{target}: {size / 1e6:.1f} MB")


def device_of(name: str) -> torch.device:
    """Return the device of this name; "" means a GPU if there is one. Raises ModelError."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} cannot be used: {error}".splitlines()[0]) from error
    return device


def profile(args: argparse.Namespace) -> None:
    """Run `instar profile`. Raises ModelError, OSError."""
    config = _full_config(args.model)
    if args.against:
        profile_against(config, _full_config(args.against), args)
        return
    checkpoint = open_checkpoint(config)
    device = device_of(args.device)
    calibration = read_calibration(config, args.calibration, args.windows, args.window_tokens)
    dtype = torch.float32 if device.type == "cpu" else config.dtype
    matrices = find_matrices(config, checkpoint, args.precision, args.method)
    say(f"{args.precision} {matrices.method}; {calibration}")
    metric: Metric = args.metric
    path = profile_path(config.folder, args.precision)
    wished = OrderProfile(
        model=checkpoint_digest(config, checkpoint),
        precision=args.precision,
        method=matrices.method,
        metric=metric,
        weights=list(args.weights),
        calibration=calibration.digest,
        windows=list(calibration.tokens.shape),
        sequence=[],
        scores={},
        seconds=0.0,
    )
    with torch.inference_mode():
        window_tokens = calibration.tokens.shape[1]
        model = LayerwiseModel(config, checkpoint, dtype=dtype, device=device, window_tokens=window_tokens)
        layers = [model.layer(i) for i in range(config.num_layers)]
        profiler = LayerRanking(
            model,
            layers,
            [model.quantized_layer(i, args.precision, matrices) for i in range(config.num_layers)],
            calibration.tokens.to(device),
            metric,
        )
        made = _incomplete(path, wished, config.num_layers)
        halves = made.halves if made else {}
        if not halves:
            progress = ProgressLine("halves", profiler.num_divergences, "trials")
            halves = profiler.divergences(progress.advance)
        if made is None:
            progress = ProgressLine("profile", profiler.num_trials, "trials")
            sequence, scores = profiler.sequence(ScoreWeights(*args.weights), progress.advance)
            seconds = round(progress.seconds, 1)
            made = replace(wished, sequence=sequence, scores=asdict(scores), seconds=seconds)
        elif not made.perplexity:
            say(f"{path}: has this order without perplexities; measuring only those")
            for layer in made.sequence:
                profiler.swap(layer)
    made = replace(
        made,
        perplexity=made.perplexity or [round(each, 4) for each in profiler.perplexity],
        halves={part: [float(f"{nats:.4g}") for nats in of_part] for part, of_part in halves.items()},
    )
    write_profile(path, made)
    say(
        f"{path}: swap layers in the order {', '.join(map(str, made.sequence))};"
        f" all of them in {made.precision} lose {made.loss or 0.0:.2%} of perplexity"
    )
    with torch.inference_mode():
        _profile_kv(config, checkpoint, calibration, model, layers)


def _profile_kv(
    config: ModelConfig,
    checkpoint: CheckpointWeights,
    calibration: Calibration,
    model: LayerwiseModel,
    layers: Sequence[Layer],
) -> None:
    """Measure what a KV cache in 8 bits loses, unless it was on this text. Raises ModelError, OSError."""
    path, digest = kv_profile_path(config.folder), checkpoint_digest(config, checkpoint)
    with suppress(ModelError):
        if read_kv_profile(path, model=digest).calibration == calibration.digest:
            return
    windows, device = calibration.tokens.to(model.device), model.device
    in_8_bits = LayerwiseModel(
        config,
        checkpoint,
        dtype=model.dtype,
        device=device,
        window_tokens=windows.shape[1],
        kv_precision="int8",
    )
    progress = ProgressLine("KV cache", len(KV_PRECISIONS) * len(windows), "windows")
    perplexity, divergence = measure_kv({"full": model, "int8": in_8_bits}, layers, windows, progress.advance)
    made = KVProfile(
        model=digest,
        calibration=calibration.digest,
        windows=list(calibration.tokens.shape),
        perplexity=[round(one, 4) for one in perplexity],
        divergence=float(f"{divergence:.4g}"),
    )
    write_kv_profile(path, made)
    say(f"{path}: the KV cache in 8 bits loses {made.loss:.3%} of perplexity")


def profile_against(config: ModelConfig, base: ModelConfig, args: argparse.Namespace) -> None:
    """Run `instar profile --against`. Raises ModelError, OSError."""
    device = device_of(args.device)
    calibration = read_calibration(base, args.calibration, args.windows, args.window_tokens)
    say(str(calibration))
    with torch.inference_mode():
        found = measure_against(config, base, calibration, device)
    write_base_loss(config.folder, found)
    lost = f"loses {found.loss:.2%} of perplexity against {base.folder}"
    say(f"{base_loss_path(config.folder)}: {lost}{f'; {found.pattern} sparse' if found.pattern else ''}")


def _incomplete(path: Path, wished: OrderProfile, num_layers: int) -> OrderProfile | None:
    """Return the stored profile if it lacks only perplexities or halves: its trials need not run again."""
    try:
        found = read_profile(path, model=wished.model, num_layers=num_layers)
    except ModelError:
        return None
    same = replace(found, sequence=[], scores={}, seconds=0.0, perplexity=[], halves={}) == wished
    return found if same and not (found.perplexity and found.halves) else None
