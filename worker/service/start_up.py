"""Start a worker from its settings: device, page pool, models, transport.

All models are loaded before the first gets its KV cache, so that each starts with its share of the pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import torch

import kernels
from bus.checkpoints import parse_model
from bus.morphs import Deploy, MorphOutcome, Retire
from bus.precisions import BITS, PRECISIONS
from bus.settings import WorkerSettings
from worker.deploy.kv_sharing import KVHolder
from worker.deploy.load import LoadRun
from worker.deploy.loader import dtype_of
from worker.deploy.model_host import ModelHost
from worker.deploy.stage_load import PipelineLoadRun, StageLoadRun
from worker.deploy.unload import UnloadRun
from worker.distributed.secure import ClusterTLS
from worker.distributed.transport import Transport
from worker.engine.build import MIB, make_pool, page_bytes_of
from worker.engine.engine import Engine
from worker.memory import MappingFailed, OutOfPages
from worker.model import ModelError
from worker.model.weights import check_budget
from worker.morph.manager import MorphManager
from worker.morph.run import NotApplied, Peers, Steps
from worker.pipeline.split import leader_of
from worker.pipeline.stage_host import StageHost
from worker.profiler.links import ProbeResponder
from worker.service import gpu_needs
from worker.service.loading import CannotServe, Progress
from worker.shape.copier import Copier

# Of the time, while the engine is busy: on a CPU loading takes cores and memory from the steps. A swap, which
# is a matter of some layers, takes less; at its share a load would take minutes.
LOAD_SHARE = 0.25
WAIT_S = 0.1  # at most, between two looks at what the loading thread does


def load(settings: WorkerSettings, worker: str, progress: Progress) -> ModelHost:
    """Load the models of the settings. Raises CannotServe, with one line that says what to change."""
    try:
        return _load(settings, worker, progress)
    except (ModelError, NotApplied, OutOfPages, MappingFailed, ValueError) as error:
        raise CannotServe(str(error)) from error


def _load(settings: WorkerSettings, worker: str, progress: Progress) -> ModelHost:
    folders = model_folders(settings.models, may_be_empty=settings.may_be_empty)
    device = _device(settings.device)
    kernels.configure(settings.threads, settings.product_kernel)
    max_tp = settings.in_force(device.type).max_tp
    page_bytes = settings.page_kib * 1024 or page_bytes_of(device, max_tp)
    pool = make_pool(device, settings.memory_mb * MIB, page_bytes)
    engine = Engine(device)
    # On a CPU copying takes cores and memory from the steps: both kinds of work share the allowance.
    share = settings.morph_share
    step_share, copy_share = (share / 2, share / 2) if device.type == "cpu" else (share, 1.0)
    morphs = MorphManager(worker, {}, step_share=step_share, copy_share=copy_share)
    model_host = ModelHost(worker, pool, engine, settings, morphs)
    _take_deployments(model_host)
    serve_models(folders, model_host, progress)
    if not folders:
        progress("compiling kernels")
        compile_ahead(device, settings)
    if settings.group_host:
        model_host.transport = Transport(
            settings.group_host,
            settings.group_timeout_s,
            is_pinned=device.type == "cuda",
            tls=ClusterTLS.of(settings),
        )
        ProbeResponder(model_host.transport, device)
        engine.stages = model_host.stages = StageHost(model_host.transport)
    return model_host


def _take_deployments(host: ModelHost) -> None:
    """Run Deploy and Retire over the models of `host`, and share KV pages between them."""
    morphs = host.morphs
    copier = morphs.make_copier(LOAD_SHARE)  # a thread of its own, so that swaps need not wait for a load

    def deploy(command: Deploy, peers: Peers) -> LoadRun:
        if not command.is_divided:
            return LoadRun(command, host, copier)
        if host.worker != leader_of(command):
            return StageLoadRun(command, host, copier)
        return PipelineLoadRun(command, host, copier, peers)

    morphs.starters[Deploy] = deploy
    morphs.starters[Retire] = lambda command, peers: UnloadRun(command, host)
    morphs.share_kv = host.share_kv


def compile_ahead(device: torch.device, settings: WorkerSettings) -> None:
    """Compile kernels before models are deployed: that holds up all threads for longer than a lease."""
    if device.type == "cpu":
        kernels.warm_up(
            dtype_of(settings.dtype, device) or torch.float32,
            hidden_size=256,
            intermediate_size=256,
            num_heads=2,
            num_kv_heads=1,
            head_dim=64,
            block_tokens=settings.block_tokens,
            bits=[BITS[name] for name in PRECISIONS if name in settings.variants],
        )


def model_folders(models: list[str], *, may_be_empty: bool = False) -> dict[str, Path]:
    """Return the folder of each name, from `name=dir` or `dir` (then the folder's). Raises CannotServe."""
    folders: dict[str, Path] = {}
    for entry in models:
        name, path = parse_model(entry)
        if name in folders:
            raise CannotServe(f"two models are called {name!r}: {folders[name]} and {path}; use name=dir")
        folders[name] = path
    if not folders and not may_be_empty:
        raise CannotServe(
            "no model to serve: set worker.models (INSTAR_MODEL) to a model folder, or worker.may_be_empty to"
            " wait for models to be deployed"
        )
    return folders


def _device(name: str) -> torch.device:
    """Return the device to serve on, "": a GPU if this machine shows one. Raises CannotServe."""
    has_gpu = bool(torch.version.cuda) and any(Path("/dev").glob("nvidia[0-9]*"))
    try:
        device = torch.device(name or ("cuda:0" if has_gpu or torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise CannotServe(f"worker.device is {name!r}: {error}; use cpu or cuda:0") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise CannotServe(f"worker.device is {name!r}; cpu and cuda are supported")
    index = device.index or 0
    problem = gpu_needs.missing(gpu_needs.find(index))
    if not problem and not torch.cuda.is_available():
        problem = "torch cannot use it: `python -c 'import torch; torch.zeros(1).cuda()'` says why"
    if problem:
        raise CannotServe(f"worker.device is {name!r}, and {problem}, or set worker.device to cpu")
    return torch.device("cuda", index)  # a thread can only be bound to a GPU with a number


def serve_models(folders: Mapping[str, Path], host: ModelHost, progress: Callable[[str], None]) -> None:
    """Load and serve the models in `folders`, by name. Raises NotApplied, and whatever `progress` raises."""
    woken = threading.Event()
    copier = Copier(woken.set)
    with ExitStack() as undo:
        undo.callback(copier.close)
        runs: list[StartUpRun] = []
        for name, folder in folders.items():
            command = Deploy(
                id="",  # the card's: it was not deployed by an order
                epoch=0,
                instance=f"{name}@{host.worker}",
                model=name,
                path=str(folder),
                stages=[],
                blocks=1,
            )
            runs.append(StartUpRun(command, host, copier, runs))
        back = undo.enter_context(ExitStack())
        for run in runs:
            back.callback(run.release)
            _drive(run, run.loading(), woken, progress)
        for run in runs:
            _drive(run, run.serving(), woken, progress)
        back.pop_all()


def _drive(run: StartUpRun, steps: Steps, woken: threading.Event, progress: Callable[[str], None]) -> None:
    with closing(steps):
        for can_go_on in steps:
            progress(f"{run.model}: {run.progress}")
            if not can_go_on:
                woken.wait(WAIT_S)
                woken.clear()


class StartUpRun(LoadRun):
    """The load of one model of the settings."""

    pages_at_once = 1 << 10  # no step waits

    def __init__(self, command: Deploy, host: ModelHost, copier: Copier, together: list[StartUpRun]) -> None:
        """together: all models that are loaded together with this one."""
        super().__init__(command, host, copier)
        self.model = command.model
        self._together = together

    def loading(self) -> Steps:
        """Bring the weights in, and the KV pages that it must have."""
        yield from self._load()
        yield from self._take_least_kv()

    def serving(self) -> Steps:
        """Take a fair share of the KV pages and serve from then on."""
        yield from self._serve()
        self._host.claim(self._command.instance, None)

    def release(self) -> None:
        """Give every page back."""
        self._loader.release()
        self._host.claim(self._command.instance, None)

    def _holders(self) -> list[KVHolder]:
        return [run._own_holder() for run in self._together]

    def _no_room(self, state: MorphOutcome, why: str) -> NotApplied:
        """Say what is missing in terms of the settings: a restart finds no other model to shrink."""
        loader, pool, cache = self._loader, self._host.pool, self._loader.cache
        advice = self._advice()
        check_budget(loader.config, loader.plan, pool, loader.weight_pages, advice)
        reserve, left = self._host.reserve_pages, pool.num_free - loader.weight_pages
        kept = f" ({reserve} are kept for swaps)" if reserve else ""
        return NotApplied(
            "failed",
            f"{loader.folder}: no room for a KV cache: a block of {cache.block_tokens} tokens takes"
            f" {loader.least_kv_pages} pages and {max(0, left - reserve)} are left of"
            f" {pool.num_pages}{kept}; {advice}",
        )

    def _advice(self) -> str:
        """Return which precision would fit: a model that is deployed may begin in fewer bits."""
        loader, pool = self._loader, self._host.pool
        others = [name for name in loader.held if name != loader.precision]
        needs = {name: loader.pages_in(name) + loader.least_kv_pages for name in others}
        room = pool.num_free - loader.reserve_pages
        fits = next((name for name in others if needs[name] <= room), None)
        if fits is None:
            either = f"; it would not fit in {others[-1]} either" if others else ""
            return f"raise memory_mb or take a smaller dtype{either}"
        mib = needs[fits] * pool.page_bytes / MIB
        return (
            f"raise memory_mb, take a smaller dtype, or deploy it in {fits}, which needs {mib:.1f} MiB with "
            "the KV of one sequence: a worker without a model (worker.may_be_empty), `instar model add DIR`, "
            f"`instar deploy {self.model} --precision {fits}`"
        )
