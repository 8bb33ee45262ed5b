"""The real service whose workers start without a model, and wait for what is deployed."""

from __future__ import annotations

from tests.support.service import Process, Service


class EmptyService(Service):
    def add_worker(self, worker: str) -> Process:
        env = {"INSTAR_WORKER__ID": worker, "INSTAR_WORKER__MODELS": "[]"}
        return self.add(worker, "worker", INSTAR_WORKER__MAY_BE_EMPTY="true", **env)
