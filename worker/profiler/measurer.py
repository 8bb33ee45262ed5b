"""From a Measure command to a profile: what is stored already, what is to be measured, what is kept of it.

Reads and writes files: not for the engine's thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bus.checkpoints import BadCheckpoint, folder_digest
from bus.deployments import LinkSample, Measure, Profile
from bus.precisions import Precision
from bus.settings import WorkerSettings
from worker.deploy.site import Site
from worker.memory import PagePool
from worker.model import ModelConfig, ModelError, read_config
from worker.profiler.device_memory import cache_bytes
from worker.profiler.fingerprint import CutPlan
from worker.profiler.grid import MAX_ROUNDS, ROUNDS, Grid, Point
from worker.profiler.links import kinds_with, measure_links
from worker.profiler.profiler import LentPages, PageSource, Profiler
from worker.profiler.stored import (
    is_of,
    kind_of,
    points_in,
    profile_path,
    program_version,
    read_stored,
    with_shapes,
    write_stored,
)
from worker.shape.layer_order import losses

log = logging.getLogger("worker")


class CannotMeasure(Exception):
    """This folder, or what is asked of it, cannot be measured; says why."""


@dataclass(frozen=True, slots=True)
class Measurer:
    """Of one worker: measures as it would serve."""

    pool: PagePool
    settings: WorkerSettings
    room: PageSource | None = None  # None: what is free
    max_rounds: int = MAX_ROUNDS

    @property
    def device(self) -> str:
        return kind_of(self.pool.backend.device)

    def find(self, command: Measure) -> Profile | None:
        """What was measured before, of the same checkpoint, on a device of this kind, by this program.
        Raises CannotMeasure."""
        self._check_digest(command)
        found = read_stored(self._path(command))
        if found is None or not is_of(found, command.digest, self.device, program_version()):
            return None
        config = _config_of(command)
        plan = self._plan(command, config)
        if set(self._grid(command, config).with_shares(plan.shares).points) - points_in(found):
            return None
        known = replace(found, model=command.model, loss=self._losses(command, config))
        return self._with_links(command, with_shapes(known, plan), plan)

    def prepare(self, command: Measure) -> Profiler:
        """Raises CannotMeasure."""
        config = _config_of(command)
        plan, grid = self._plan(command, config), self._grid(command, config)
        return Profiler(
            plan,
            grid,
            self.pool,
            room=self.room,
            max_pages=command.max_bytes // self.pool.page_bytes,
            probe=self._probe(command, plan),
        )

    def _probe(self, command: Measure, plan: CutPlan) -> Callable[[], list[LinkSample]] | None:
        """None: there is nobody to measure it with."""
        peer, settings, device = command.peer, self.settings, self.pool.backend.device
        if peer is None or not settings.group_host:
            return None
        return lambda: measure_links(
            peer, plan.config.hidden_size, plan.model.dtype, device, settings.group_host
        )

    def _with_links(self, command: Measure, found: Profile, plan: CutPlan) -> Profile:
        """What had nobody to measure it with when the rest was, is measured now."""
        peer, told = command.peer, {one.kind for one in found.links}
        probe = self._probe(command, plan) if peer and kinds_with(peer) - told else None
        links = probe() if probe else []
        if not {one.kind for one in links} > told:
            return found
        profile = replace(found, links=links)
        self._write(command, profile)
        return profile

    def _plan(self, command: Measure, config: ModelConfig) -> CutPlan:
        """Raises CannotMeasure."""
        settings = self.settings
        try:
            return CutPlan(
                config,
                command.precisions,
                dtype=_dtype(settings.dtype, self.pool.backend.device) or config.dtype,
                page_bytes=self.pool.page_bytes,
                max_tp=settings.max_tp,
                load_format=settings.load_format,
                method=settings.quantization,
                cache_bytes=cache_bytes(self.pool.backend.device),
            )
        except (ModelError, ValueError) as error:
            raise CannotMeasure(str(error)) from error

    def keep(self, command: Measure, profiler: Profiler) -> Profile:
        """The profile, and a file of it where the model's folder may be written to. Raises CannotMeasure:
        the checkpoint is another one by now."""
        self._check_digest(command)
        measured = profiler.profile(
            model=command.model, digest=command.digest, device=self.device, version=program_version()
        )
        measured = replace(measured, loss=self._losses(command, profiler.plan.whole))
        profile = with_shapes(measured, profiler.plan)
        self._write(command, profile)
        return profile

    def _write(self, command: Measure, profile: Profile) -> None:
        try:
            write_stored(self._path(command), profile)
        except OSError as error:
            log.warning("the profile of %s is kept in Redis alone: %s", command.model, error)

    def _losses(self, command: Measure, config: ModelConfig) -> dict[Precision, float]:
        """Of what `instar profile` stored beside the model; read each time, for it may come later."""
        if self.settings.load_format == "dummy":
            return {}
        try:
            return losses(config, command.precisions, self.settings.quantization)
        except ModelError as error:
            log.warning("what %s loses in fewer bits is not known: %s", command.model, error)
            return {}

    def _grid(self, command: Measure, config: ModelConfig) -> Grid:
        """Raises CannotMeasure."""
        grid = Grid(
            points=_points(command),
            block_tokens=self.settings.block_tokens,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            rounds=min(ROUNDS, self.max_rounds),
            max_rounds=self.max_rounds,
        )
        context = config.max_position_embeddings
        fitting = grid.within(context)
        if not fitting.points:
            raise CannotMeasure(
                f"prompts of {min(command.prompt_tokens)} tokens and more, and their answers, are longer than"
                f" the model's context of {context}"
            )
        return fitting

    def _path(self, command: Measure) -> Path:
        return profile_path(Path(command.path), self.device, program_version())

    def _check_digest(self, command: Measure) -> None:
        try:
            digest = folder_digest(Path(command.path))
        except BadCheckpoint as error:
            raise CannotMeasure(str(error)) from error
        if digest != command.digest:
            raise CannotMeasure(
                f"{command.path} is not the checkpoint that was registered ({digest}, not"
                f" {command.digest}): it has changed; register it again"
            )


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    """What to serve in; None: what the checkpoint has."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def measurer_of(site: Site) -> Measurer:
    """Of a worker that serves."""
    return Measurer(site.pool, site.settings, LentPages(site))


def _config_of(command: Measure) -> ModelConfig:
    try:
        return read_config(Path(command.path))
    except ModelError as error:
        raise CannotMeasure(str(error)) from error


def _points(command: Measure) -> list[Point]:
    if not (command.precisions and command.prompt_tokens and command.batch_sizes):
        raise CannotMeasure("nothing to measure: name a precision, a prompt size and a batch size at least")
    if min(*command.prompt_tokens, *command.batch_sizes) < 1:
        raise CannotMeasure("prompts and batches have one token and one request at least")
    tokens, sizes = sorted(set(command.prompt_tokens)), sorted(set(command.batch_sizes))
    return [Point(*one) for one in itertools.product(dict.fromkeys(command.precisions), tokens, sizes)]
