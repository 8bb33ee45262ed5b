"""The models of a worker's settings, loaded before the engine's thread starts.

All are loaded before the first gets its KV cache, so that each starts with its fair share of the pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from bus.messages import Deploy, MorphOutcome
from worker.deploy.kv_sharing import KVHolder
from worker.deploy.load import LoadRun
from worker.deploy.model_host import ModelHost
from worker.model.weights import check_budget
from worker.morph.run import NotApplied, Steps
from worker.shape.copier import Copier

WAIT_S = 0.1  # at most, between two looks at what the loading thread does


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
        check_budget(loader.config, loader.plan, pool, loader.weight_pages)
        reserve, left = self._host.reserve_pages, pool.num_free - loader.weight_pages
        kept = f" ({reserve} are kept for swaps)" if reserve else ""
        return NotApplied(
            "failed",
            f"{loader.folder}: no room for a KV cache: a block of {cache.block_tokens} tokens takes"
            f" {loader.least_kv_pages} pages and {max(0, left - reserve)} are left of"
            f" {pool.num_pages}{kept}; raise memory_mb",
        )
