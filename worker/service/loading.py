"""From settings to an engine that has run its first request."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

import kernels
from bus.precisions import BITS, PRECISIONS
from bus.settings import WorkerSettings
from worker.deploy.newcomer import dtype_of
from worker.deploy.site import Resident, Site
from worker.distributed.probe import ProbeResponder
from worker.distributed.transport import Transport
from worker.engine.build import (
    MIB,
    Shape,
    cache_text,
    fill_caches,
    make_cache,
    make_instance,
    make_pool,
    run_canary,
    useful_pages,
)
from worker.engine.engine import Engine
from worker.memory import MappingFailed, OutOfPages, PagePool
from worker.model import Model, ModelError, load_model
from worker.morph.resizer import KVResizer
from worker.morph.target import Target
from worker.morph.verbs import reserve_pages
from worker.parallel.grouping import Grouping
from worker.pipeline.stage_host import StageHost
from worker.service.cards import card_of
from worker.service.load_morphs import bits_of, grouping_for, layer_order, load_variants, make_executor
from worker.service.loaded import CannotServe, Loaded, Progress

log = logging.getLogger("worker")


def load(settings: WorkerSettings, worker: str, progress: Progress) -> Loaded:
    """Raises CannotServe, with one line that says what to change."""
    try:
        return _load(settings, worker, progress)
    except (ModelError, OutOfPages, MappingFailed, ValueError) as error:
        raise CannotServe(str(error)) from error


def _load(settings: WorkerSettings, worker: str, progress: Progress) -> Loaded:
    folders = model_folders(settings.models, may_be_empty=settings.may_be_empty)
    device = _device(settings.device)
    kernels.configure(settings.threads)
    pool = make_pool(device, settings.memory_mb * MIB, settings.page_kib * 1024)
    shape = Shape(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        block_tokens=settings.block_tokens,
    )
    models = {name: _load_model(name, path, pool, settings, progress) for name, path in folders.items()}
    variants = {name: load_variants(name, model, pool, settings, progress) for name, model in models.items()}
    parts = {}
    for name, model in models.items():
        limits = shape.limits(model)
        parts[name] = (make_cache(pool, model, limits, name), model, limits)
    reserve = max(
        (reserve_pages(variants[name], model.config.num_layers) for name, model in models.items()), default=0
    )
    fill_caches(pool, list(parts.values()), reserve)
    engine = Engine(device)
    site = Site(worker, pool, engine, settings)
    if settings.group_host:
        site.transport = Transport(
            settings.group_host, settings.group_timeout_s, is_pinned=device.type == "cuda"
        )
        ProbeResponder(site.transport, device)
        engine.parts = site.stages = StageHost(site.transport)
    grouping: Grouping | None = None
    for name, (cache, model, limits) in parts.items():
        progress(f"{name}: compiling kernels and running the first request")
        instance = make_instance(f"{name}@{worker}", model, cache, limits, bits=bits_of(variants[name]))
        run_canary(instance)
        resizer = KVResizer(
            instance, cache, reserve_pages=reserve, useful_pages=useful_pages(cache, model, limits)
        )
        order, order_name = layer_order(folders[name], model, settings)
        target = Target(instance, variants[name], resizer, order)
        if len(parts) == 1:
            grouping = grouping_for(name, target, model, pool, settings, worker, site.transport)
        card = card_of(target, name, folders[name], model, order_name, settings, worker, grouping)
        site.add(Resident(card, target, model))
        log.info("%s: %s", name, cache_text(cache, limits))
    if not parts:
        progress("compiling kernels")
        compile_ahead(device, settings)
    morphs = make_executor(worker, site, settings, device, grouping)
    cards = [resident.card for resident in site.residents.values()]
    return Loaded(
        engine, cards, pool.counts, str(device), pool.page_bytes, morphs, grouping, site, site.transport
    )


def compile_ahead(device: torch.device, settings: WorkerSettings) -> None:
    """Of a worker that waits for models: a compiler holds up all threads of the process, for longer than a
    lease lasts. What depends on a model's own sizes is compiled with it."""
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
    """Served name -> folder, from `name=dir` or `dir` (then the folder's name). Raises CannotServe."""
    folders: dict[str, Path] = {}
    for entry in models:
        name, is_named, folder = entry.partition("=")
        if not is_named or "/" in name:  # the = is one of the folder's
            name, folder = "", entry
        path = Path(folder).expanduser().resolve()
        name = name or path.name
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
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda:0" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise CannotServe(f"worker.device is {name!r}: {error}; use cpu or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise CannotServe(f"worker.device is {name!r}; cpu and cuda are supported")
    if device.type == "cuda" and (not has_gpu or (device.index or 0) >= torch.cuda.device_count()):
        raise CannotServe(f"worker.device is {name!r}, and this machine has {torch.cuda.device_count()} GPUs")
    # A thread can only be bound to a GPU with a number.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _load_model(name: str, path: Path, pool: PagePool, settings: WorkerSettings, progress: Progress) -> Model:
    def tell(done: int, total: int) -> None:
        progress(f"loading {name}: {done / total:.0%} of {total / MIB:.0f} MiB")

    return load_model(
        path,
        pool,
        dtype=dtype_of(settings.dtype, pool.backend.device),
        load_format=settings.load_format,
        max_tp=settings.max_tp,
        progress=tell,
    )
