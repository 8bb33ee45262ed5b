"""Measure commands: find a stored profile, prepare a profiler, keep its result.

Reads and writes files: not for the engine's thread.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from bus.checkpoints import BadCheckpoint, folder_digest
from bus.deployments import Configuration, LinkSample, Measure, MemorySample, Profile
from bus.precisions import Precision
from bus.settings import WorkerSettings
from bus.version import program_version
from worker.deploy.loader import dtype_of
from worker.deploy.model_host import ModelHost
from worker.distributed.secure import ClusterTLS
from worker.memory import PagePool
from worker.model import ModelConfig, ModelError, read_config
from worker.model.quantized_sets import FOLDER, writing_whole
from worker.profiler.device_memory import cache_bytes
from worker.profiler.fingerprint import CutPlan
from worker.profiler.grid import MAX_ROUNDS, ROUNDS, Grid, Point
from worker.profiler.links import kinds_with, measure_links
from worker.profiler.profiler import LentPages, Profiler, block_bytes
from worker.shape.copier import Copier
from worker.shape.kv_profile import kv_loss_or_why
from worker.shape.layer_order import losses

log = logging.getLogger("worker")

# Share of a worker's pages for the layers of a fingerprint, if fewer of them will do; the rest is for KV.
MOST_PAGES = 0.75


class CannotMeasure(Exception):
    """A command cannot be carried out; says why."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise CannotMeasure for a checkpoint that cannot be measured."""
    try:
        yield
    except (BadCheckpoint, ModelError, ValueError) as error:
        raise CannotMeasure(str(error)) from error


@dataclass(frozen=True, slots=True)
class Measurer:
    """Carries out the Measure commands of one worker, measuring as it would serve."""

    pool: PagePool
    settings: WorkerSettings  # in force on the device
    lent: LentPages | None = None  # beside the free pages
    copier: Copier = field(default_factory=lambda: Copier(lambda: None))
    max_rounds: int = MAX_ROUNDS

    @property
    def device(self) -> str:
        return kind_of(self.pool.backend.device)

    @_refusing()
    def find(self, command: Measure) -> Profile | None:
        """Return the stored profile of the same checkpoint, kind of device, program, KV and pages, or None.

        Raises CannotMeasure.
        """
        self._check_digest(command)
        command, config = _of_checkpoint(command)
        try:
            found = msgspec.json.decode(self._path(command).read_bytes(), type=Profile)
        except (OSError, ValueError):
            return None
        if (found.digest, found.device, found.version) != (command.digest, self.device, program_version()):
            return None
        plan = self._plan(command, config)
        measured = {
            Point(one.configuration.precision, one.prompt_tokens, one.batch_size, one.configuration.tp)
            for one in found.latency
        }
        grid = self._grid(command, config).with_shares(plan.shares)
        sizes = found.block_bytes_per_layer, found.page_bytes
        if set(grid.points) - measured or sizes != (block_bytes(plan, grid), plan.page_bytes):
            return None
        known = replace(found, model=command.model, loss=self._losses(command, config))
        shaped = self._with_kv(with_shapes(known, plan, grid), plan, config)
        return self._with_links(command, shaped, plan)

    @_refusing()
    def prepare(self, command: Measure) -> Profiler:
        """Make the profiler of a command. Raises CannotMeasure."""
        command, config = _of_checkpoint(command)
        plan, grid = self._plan(command, config), self._grid(command, config)
        max_pages, probe = command.max_bytes // self.pool.page_bytes, self._probe(command, plan)
        return Profiler(
            plan, grid, self.pool, copier=self.copier, lent=self.lent, max_pages=max_pages, probe=probe
        )

    def _probe(self, command: Measure, plan: CutPlan) -> Callable[[], list[LinkSample]] | None:
        """Return the function that measures links, or None without a peer."""
        peer, host, device = command.peer, self.settings.group_host, self.pool.backend.device
        if peer is None or not host:
            return None
        tls = ClusterTLS.of(self.settings)
        return lambda: measure_links(peer, plan.config.hidden_size, plan.model.dtype, device, host, tls=tls)

    def _with_links(self, command: Measure, found: Profile, plan: CutPlan) -> Profile:
        """Measure the links of a stored profile now if there was no peer before."""
        peer, known = command.peer, {one.kind for one in found.links}
        probe = self._probe(command, plan) if peer and kinds_with(peer) - known else None
        links = probe() if probe else []
        if not {one.kind for one in links} > known:
            return found
        profile = replace(found, links=links)
        self._write(command, profile)
        return profile

    def _plan(self, command: Measure, config: ModelConfig) -> CutPlan:
        """Plan the fingerprint of a command: as many layers as the caches hold, or as there is room for.

        Raises ModelError, ValueError.
        """
        settings, device = self.settings, self.pool.backend.device
        take_turns = cache_bytes(device)
        while True:
            plan = CutPlan(
                config,
                command.precisions,
                dtype=dtype_of(settings.dtype, device) or config.dtype,
                page_bytes=self.pool.page_bytes,
                max_tp=settings.max_tp,
                load_format=settings.load_format,
                method=settings.quantization,
                cache_bytes=take_turns,
            )
            are_fewest = max(plan.turns.values()) == plan.depths[-1]
            if are_fewest or plan.num_pages <= MOST_PAGES * self.pool.num_pages:
                return plan
            take_turns //= 4

    @_refusing()
    def keep(self, command: Measure, profiler: Profiler) -> Profile:
        """Return the measured profile, and write it beside the model if its folder can be written to.

        Raises CannotMeasure if the checkpoint has changed meanwhile.
        """
        self._check_digest(command)
        measured = profiler.profile(
            model=command.model, digest=command.digest, device=self.device, version=program_version()
        )
        plan, whole = profiler.plan, profiler.plan.whole
        loss = self._losses(command, whole)
        shaped = with_shapes(replace(measured, loss=loss), plan, profiler.grid)
        profile = self._with_kv(shaped, plan, whole)
        self._write(command, profile)
        return profile

    def _write(self, command: Measure, profile: Profile) -> None:
        try:
            write_stored(self._path(command), profile)
        except OSError as error:
            log.warning("the profile of %s is kept only in Redis: %s", command.model, error)

    def _with_kv(self, profile: Profile, plan: CutPlan, config: ModelConfig) -> Profile:
        """Add the form of KV that was measured, what one in 8 bits loses, and what it would gain."""
        tokens, dtype = self.settings.block_tokens, plan.model.dtype
        profile = replace(profile, kv_gain=1.0, kv_loss=None, kv_dtype=self.settings.kv_dtype)
        if tokens % 2:
            return profile
        measured = plan.config.kv_block_bytes(tokens, dtype, profile.kv_dtype)
        in_8_bits = plan.config.kv_block_bytes(tokens, dtype, "int8")
        loss = None
        if self.settings.load_format != "dummy":
            loss, why = kv_loss_or_why(config)
            if loss is None:
                log.info("the loss of KV in 8 bits of %s is unknown: %s", profile.model, why)
        return replace(profile, kv_gain=measured / in_8_bits, kv_loss=loss)

    def _losses(self, command: Measure, config: ModelConfig) -> dict[Precision, float]:
        """Return what `instar profile` stored beside the model; read each time, as it may come later."""
        if self.settings.load_format == "dummy":
            return {}
        if config.fixed_precision:
            return {config.fixed_precision: 0.0}  # against the checkpoint
        try:
            return losses(config, command.precisions, self.settings.quantization)
        except ModelError as error:
            log.warning("the loss of %s in fewer bits is unknown: %s", command.model, error)
            return {}

    def _grid(self, command: Measure, config: ModelConfig) -> Grid:
        """Return the grid of a command. Raises CannotMeasure."""
        grid = Grid(
            points=_points(command),
            block_tokens=self.settings.block_tokens,
            kv_dtype=self.settings.kv_dtype,
            cuda_graphs=self.settings.cuda_graphs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            rounds=min(ROUNDS, self.max_rounds),
            max_rounds=self.max_rounds,
        )
        context = config.max_position_embeddings
        if not (fitting := grid.within(context)).points:
            raise CannotMeasure(
                f"prompts of {min(command.prompt_tokens)} tokens or more, with their answers, are longer than"
                f" the model's context of {context}"
            )
        return fitting

    def _path(self, command: Measure) -> Path:
        return profile_path(Path(command.path), self.device, program_version())

    def _check_digest(self, command: Measure) -> None:
        digest = folder_digest(Path(command.path))
        if digest != command.digest:
            raise CannotMeasure(
                f"{command.path} is not the checkpoint that was registered ({digest}, not"
                f" {command.digest}): it has changed; register it again"
            )


def measurer_of(model_host: ModelHost) -> Measurer:
    """Return the measurer of a worker that serves."""
    settings = model_host.settings
    copier = model_host.morphs.make_copier(settings.morph_share)
    return Measurer(model_host.pool, settings, LentPages(model_host), copier)


def _of_checkpoint(command: Measure) -> tuple[Measure, ModelConfig]:
    """Return the command with the precisions that the checkpoint has, and its config. Raises ModelError."""
    config = read_config(Path(command.path))
    fixed = config.fixed_precision
    return (replace(command, precisions=[fixed]) if fixed else command), config


def _points(command: Measure) -> list[Point]:
    if not (command.precisions and command.prompt_tokens and command.batch_sizes):
        raise CannotMeasure("nothing to measure: name at least a precision, a prompt size and a batch size")
    if min(*command.prompt_tokens, *command.batch_sizes) < 1:
        raise CannotMeasure("prompts and batches must have at least one token and one request")
    tokens, sizes = sorted(set(command.prompt_tokens)), sorted(set(command.batch_sizes))
    return [Point(*one) for one in itertools.product(dict.fromkeys(command.precisions), tokens, sizes)]


def kind_of(device: torch.device | str) -> str:
    """Return the kind of a device, "cpu" or a GPU's name. Devices of one kind measure alike."""
    device = torch.device(device)
    return str(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)


def profile_path(folder: Path, device: str, program: str) -> Path:
    """Return the path of a profile, beside the model's sets and orders. device: its kind."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device}-{program}")
    return folder / FOLDER / f"fingerprint-{plain}.json"


def write_stored(path: Path, profile: Profile) -> None:
    """Write a profile whole or not at all. Raises OSError."""
    with writing_whole(path) as unfinished:
        unfinished.write_text(json.dumps(asdict(profile), indent=1) + "\n")


STAGES = 2


def with_shapes(profile: Profile, plan: CutPlan, grid: Grid) -> Profile:
    """Add the memory of every degree, and of two stages, computed from the layout (iServe §5.2).

    Samples whose activations were measured stay as they are.
    """
    measured = [one for one in profile.memory if one.activation_bytes is not None]
    known = {(one.num_layers, one.configuration) for one in measured}
    others = [one for one in _laid_out(plan) if (one.num_layers, one.configuration) not in known]
    ranks = list(plan.rank_sizes(grid.block_tokens, grid.kv_dtype))
    return replace(profile, memory=[*measured, *others], degrees=plan.degrees, ranks=ranks)


def _laid_out(plan: CutPlan) -> Iterator[MemorySample]:
    for precision, depth in itertools.product(plan.all_precisions, plan.depths):
        shapes = [Configuration(tp=tp, precision=precision) for tp in plan.degrees[1:]]
        if depth >= STAGES:  # stages repeat nothing: only the first has the ends
            shapes.append(Configuration(pp=STAGES, precision=precision))
        for shape in shapes:
            nbytes = plan.weight_bytes(depth, precision, shape.tp)
            yield MemorySample(num_layers=depth, configuration=shape, weight_bytes=nbytes)
