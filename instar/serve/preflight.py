"""Mistakes of the settings that show without starting anything, and without the seconds that torch takes.

Plain functions from settings and the file system to a complaint, "" if there is none. The processes judge
again for themselves: they know more (architectures, shapes, memory) and may run without `instar serve`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from bus.settings import GatewaySettings, Settings, WorkerSettings
from instar.serve.programs import count_gpus

DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")


def why_not_serve(settings: Settings) -> str:
    """The first reason why no process of these settings could work; it says what to change."""
    return (
        why_not_models(settings.worker) or why_not_device(settings.worker) or why_not_open(settings.gateway)
    )


def why_not_models(worker: WorkerSettings) -> str:
    folders: dict[str, Path] = {}
    for entry in worker.models:
        name, folder = parse_model(entry)
        if problem := _why_not_folder(folder, worker.load_format):
            return f"model {entry!r}: {problem}"
        if name in folders:
            return (
                f"two models are called {name!r}: {folders[name]} and {folder}; give one another name: "
                f"`instar serve {name}=DIR other=DIR`"
            )
        folders[name] = folder
    return ""


def why_not_device(worker: WorkerSettings) -> str:
    name = worker.device
    if name and not DEVICE.fullmatch(name):
        return f"worker.device (--device) is {name!r}; it may be cpu, cuda or cuda:N (N from 0)"
    if name.startswith("cuda") and not _may_have_gpu():
        return (
            f"worker.device (--device) is {name!r}, and this machine shows no NVIDIA GPU; `--device cpu` runs"
        )
    return ""


def why_not_open(gateway: GatewaySettings) -> str:
    if gateway.loopback_only or gateway.api_keys:
        return ""
    return (
        f"gateway.host (--host) is {gateway.host!r}, which is open to other machines, and no key is set: "
        "add `--api-key KEY`, or listen on 127.0.0.1"
    )


def parse_model(entry: str) -> tuple[str, Path]:
    """(served name, folder) of `name=dir` or `dir`, which then gives the name; as the worker takes it."""
    name, is_named, folder = entry.partition("=")
    if not is_named or "/" in name:  # the = is one of the folder's
        name, folder = "", entry
    path = Path(folder).expanduser().resolve()
    return name or path.name, path


def _why_not_folder(folder: Path, load_format: str) -> str:
    if folder.is_file():
        is_inside = (folder.parent / "config.json").is_file()
        which = f"the one it lies in: {folder.parent}" if is_inside else "one in Hugging Face's format"
        return f"{folder} is a file; name a folder, {which}"
    if not folder.is_dir():
        return f"there is no folder {folder}; models are read from local folders, nothing is downloaded"
    config = folder / "config.json"
    if not config.is_file():
        return f"no config.json in {folder}; a model is a folder in Hugging Face's format"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        return f"{config} cannot be read as JSON: {error}"
    if load_format == "dummy" or any((folder / name).is_file() for name in WEIGHTS):
        return ""
    others = sorted(path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern))
    found = f" ({others[0]} is not read: weights must be safetensors)" if others else ""
    return (
        f"a config.json and no weights in {folder}{found}; put {WEIGHTS[0]} or {WEIGHTS[1]} there, or try "
        "its shape with random weights: `--load-format dummy`"
    )


def _may_have_gpu() -> bool:
    """No only where it is certain: /dev/nvidia* is there in sandboxes without /proc, /dev/dxg under WSL."""
    return count_gpus() > 0 or any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists()
