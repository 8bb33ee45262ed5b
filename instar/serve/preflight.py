"""Checks of the settings before anything starts, without the seconds that importing torch takes.

Each function returns what is wrong and what to change, "" if nothing is. The processes check again.
"""

from __future__ import annotations

import errno
import re
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from bus.checkpoints import BadCheckpoint, read_checkpoint
from bus.pulled import is_unfinished
from bus.settings import GatewaySettings, Settings, WorkerSettings
from bus.tls import TLSProblem, server_context
from instar.errors import InputError
from instar.serve.models import SUFFIX, find_model, gguf_problem
from instar.serve.programs import count_gpus

DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
# What the gateway, the workers and their models need beside the packages that every process has.
NEEDED: Final = ("fastapi", "uvicorn", "transformers", "torch", "numba", "safetensors", "llguidance")


def settings_problem(settings: Settings) -> str:
    """Return the first reason why no process could work with these settings."""
    worker = settings.worker
    gateway = settings.gateway
    return (
        packages_problem()
        or models_problem(worker)
        or device_problem(worker)
        or exposure_problem(gateway)
        or tls_problem(gateway)
    )


def packages_problem() -> str:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return ""
    which = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
    return f"{which} not installed here; `pip install 'instar[serve]'` brings all that one machine needs"


def models_problem(worker: WorkerSettings) -> str:
    folders: dict[str, Path] = {}
    for entry in worker.models:
        try:
            model = find_model(entry)
        except InputError as error:
            return str(error)
        name, folder = model.name, model.path
        given = entry.rpartition("=")[2]
        if is_unfinished(given) and not folder.is_dir():
            return f"model {entry!r}: its download has not ended; `instar pull {given}` goes on"
        if problem := gguf_problem(folder) if model.is_gguf else _folder_problem(folder, worker.load_format):
            return f"model {entry!r}: {problem}"
        if name in folders:
            return (
                f"two models are called {name!r}: {folders[name]} and {folder}; give one another name: "
                f"`instar serve {name}=DIR other=DIR`"
            )
        folders[name] = folder
    return ""


def device_problem(worker: WorkerSettings) -> str:
    name = worker.device
    if name and not DEVICE.fullmatch(name):
        return f"worker.device (--device) is {name!r}; it may be cpu, cuda or cuda:N (N from 0)"
    if name.startswith("cuda") and not _may_have_gpu():
        return (
            f"worker.device (--device) is {name!r}, and this machine shows no NVIDIA GPU; `--device cpu` runs"
        )
    return ""


def exposure_problem(gateway: GatewaySettings) -> str:
    if gateway.loopback_only or gateway.api_keys or gateway.keys_file:
        return ""
    return (
        f"gateway.host (--host) is {gateway.host!r}, which is open to other machines, and no key is set: "
        "add `--api-key KEY`, or listen on 127.0.0.1"
    )


def tls_problem(gateway: GatewaySettings) -> str:
    if gateway.ssl_certfile:
        try:
            server_context(gateway.ssl_certfile, gateway.ssl_keyfile, setting="gateway")
        except TLSProblem as problem:
            return str(problem)
    return ""


def _folder_problem(folder: Path, load_format: str) -> str:
    if folder.is_file():
        is_inside = (folder.parent / "config.json").is_file()
        which = f"the one it lies in: {folder.parent}" if is_inside else "one in Hugging Face's format"
        return f"{folder} is a file; name a folder, {which}"
    try:
        read_checkpoint(folder)
    except BadCheckpoint as error:
        return str(error)
    if load_format == "dummy" or any((folder / name).is_file() for name in WEIGHTS):
        return ""
    others = sorted(path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern))
    how = ""
    if others and others[0].endswith(".bin"):
        how = f"; `instar convert {folder} TARGET` makes them"
    elif others and others[0].endswith(SUFFIX):
        how = f"; `instar serve {folder / others[0]}` makes them"
    found = f" ({others[0]} is not read: weights must be safetensors{how})" if others else ""
    return (
        f"a config.json and no weights in {folder}{found}; put {WEIGHTS[0]} or {WEIGHTS[1]} there, or try "
        "its shape with random weights: `--load-format dummy`"
    )


def _may_have_gpu() -> bool:
    """Return False only if there is certainly none: sandboxes lack /proc, WSL has /dev/dxg."""
    return count_gpus() > 0 or any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists()


def listening_problem(host: str, port: int) -> str:
    """Return what keeps a server from listening there and what to do, "" if nothing does."""
    place = f"port {port} of {host or 'every address'}"
    try:
        address = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(address[0], address[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the option that servers set
            probe.bind(address[4])
            probe.listen(1)  # two may bind with SO_REUSEADDR; only one may listen
    except socket.gaierror as error:
        return f"{host!r} is not an address of this machine ({error.strerror}); gateway.host may be 127.0.0.1"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other = port + 1 if port < 65535 else port - 1
            return (
                f"{place} is in use: end the program that listens there (`ss -ltnp` names it), or use "
                f"another port: `instar serve --port {other}` or INSTAR_PORT={other}"
            )
        if error.errno == errno.EACCES:
            return f"{place} may only be opened by root; use one above 1023: `instar serve --port 8000`"
        return f"{place} cannot be opened: {error.strerror}; gateway.host may be 127.0.0.1"
    return ""
