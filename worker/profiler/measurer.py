"""Measure commands: find a stored profile, prepare a profiler, keep its result.

Reads and writes files: not for the engine's thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bus.checkpoints import BadCheckpoint, folder_digest
from bus.deployments import LinkSample, Measure, Profile
from bus.precisions import Precision
from bus.settings import WorkerSettings
from worker.deploy.loader import dtype_of
from worker.deploy.model_host import ModelHost
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
    """A command cannot be carried out; says why."""


@dataclass(frozen=True, slots=True)
class Measurer:
    """Carries out the Measure commands of one worker, measuring as it would serve."""

    pool: PagePool
    settings: WorkerSettings
    pages: PageSource | None = None  # None: the free pages
    max_rounds: int = MAX_ROUNDS

    @property
    def device(self) -> str:
        return kind_of(self.pool.backend.device)

    def find(self, command: Measure) -> Profile | None:
        """Return the stored profile of the same checkpoint, kind of device and program, or None.

        Raises CannotMeasure.
        """
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
        """Make the profiler of a command. Raises CannotMeasure."""
        config = _config_of(command)
        plan, grid = self._plan(command, config), self._grid(command, config)
        return Profiler(
            plan,
            grid,
            self.pool,
            page_source=self.pages,
            max_pages=command.max_bytes // self.pool.page_bytes,
            probe=self._probe(command, plan),
        )

    def _probe(self, command: Measure, plan: CutPlan) -> Callable[[], list[LinkSample]] | None:
        """Return the function that measures links, or None without a peer."""
        peer, settings, device = command.peer, self.settings, self.pool.backend.device
        if peer is None or not settings.group_host:
            return None
        return lambda: measure_links(
            peer, plan.config.hidden_size, plan.model.dtype, device, settings.group_host
        )

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
        """Plan the fingerprint of a command. Raises CannotMeasure."""
        settings = self.settings
        try:
            return CutPlan(
                config,
                command.precisions,
                dtype=dtype_of(settings.dtype, self.pool.backend.device) or config.dtype,
                page_bytes=self.pool.page_bytes,
                max_tp=settings.max_tp,
                load_format=settings.load_format,
                method=settings.quantization,
                cache_bytes=cache_bytes(self.pool.backend.device),
            )
        except (ModelError, ValueError) as error:
            raise CannotMeasure(str(error)) from error

    def keep(self, command: Measure, profiler: Profiler) -> Profile:
        """Return the measured profile, and write it beside the model if its folder can be written to.

        Raises CannotMeasure if the checkpoint has changed meanwhile.
        """
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
            log.warning("the profile of %s is kept only in Redis: %s", command.model, error)

    def _losses(self, command: Measure, config: ModelConfig) -> dict[Precision, float]:
        """Return what `instar profile` stored beside the model; read each time, as it may come later."""
        if self.settings.load_format == "dummy":
            return {}
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
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            rounds=min(ROUNDS, self.max_rounds),
            max_rounds=self.max_rounds,
        )
        context = config.max_position_embeddings
        fitting = grid.within(context)
        if not fitting.points:
            raise CannotMeasure(
                f"prompts of {min(command.prompt_tokens)} tokens or more, with their answers, are longer than"
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


def measurer_of(model_host: ModelHost) -> Measurer:
    """Return the measurer of a worker that serves."""
    return Measurer(model_host.pool, model_host.settings, LentPages(model_host))


def _config_of(command: Measure) -> ModelConfig:
    try:
        return read_config(Path(command.path))
    except ModelError as error:
        raise CannotMeasure(str(error)) from error


def _points(command: Measure) -> list[Point]:
    if not (command.precisions and command.prompt_tokens and command.batch_sizes):
        raise CannotMeasure("nothing to measure: name at least a precision, a prompt size and a batch size")
    if min(*command.prompt_tokens, *command.batch_sizes) < 1:
        raise CannotMeasure("prompts and batches must have at least one token and one request")
    tokens, sizes = sorted(set(command.prompt_tokens)), sorted(set(command.batch_sizes))
    return [Point(*one) for one in itertools.product(dict.fromkeys(command.precisions), tokens, sizes)]
