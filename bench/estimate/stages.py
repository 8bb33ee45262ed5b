"""A whole model in stages, for `bench.estimate`: each in a process, the first one in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.engines import greedy
from bench.engine.stage_processes import TIMEOUT_S, LocalStage, StageProcesses, Staging, lead
from bench.estimate.truth import Prompts, Running
from bus.deployments import Configuration, ProbePeer
from bus.precisions import Precision


class Stages:
    """A whole model in stages; `peer` is a worker to measure links with."""

    def __init__(self, staging: Staging) -> None:
        self.shape = Configuration(pp=len(staging.parts))
        self._woken = threading.Event()
        self._num_requests, self._num_others = 0, len(staging.parts) - 1
        self._processes = StageProcesses(staging)
        try:
            self._stage = LocalStage(staging, 0)
            behind = self._processes.wait()
            with torch.inference_mode():
                self._instance = lead(self._stage, behind, self._woken)
        except BaseException:
            self._processes.close()
            raise
        [peer] = behind[0].peers
        self.peer = ProbePeer(worker=peer.worker, link=peer.address, link_key=peer.key)

    def use(self, precision: Precision) -> None:
        self._stage.use(precision)
        self._instance.reshaped()
        self._processes.ask_each("use", [(precision,)] * self._num_others)

    def run(self, prompts: Prompts, output_tokens: int) -> Running:
        began = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            self._instance.submit(greedy(str(self._num_requests), prompt, output_tokens))
        self._run()
        took = time.perf_counter() - began
        yield
        return took

    def activation_bytes(self, prompts: Prompts) -> Generator[None, None, int]:
        self._stage.watch()
        self._processes.ask_each("watch")
        yield from self.run(prompts, 2)
        others: list[int] = self._processes.ask_each("peak_bytes")
        return self._stage.peak_bytes() + sum(others)

    def weight_bytes(self, precision: Precision) -> int:
        others: list[int] = self._processes.ask_each("weight_bytes", [(precision,)] * self._num_others)
        return self._stage.weight_bytes(precision) + sum(others)

    def kv_bytes(self, num_blocks: int) -> int:
        others: list[int] = self._processes.ask_each("kv_bytes", [(num_blocks,)] * self._num_others)
        return self._stage.kv_bytes(num_blocks) + sum(others)

    def close(self) -> None:
        self._instance.close()
        self._processes.close()
        self._stage.release()

    def _run(self) -> None:
        """Step until no request is left. Raises RuntimeError if a stage does not answer."""
        instance = self._instance
        while instance.has_work:
            if not instance.can_step:
                if not self._woken.wait(TIMEOUT_S):
                    raise RuntimeError(f"no stage has answered within {TIMEOUT_S:g} s")
                self._woken.clear()
                continue
            with self._stage.watched(), torch.inference_mode():
                outputs = instance.step()
            if failed := [one.delta.error for one in outputs if one.delta.error]:
                raise RuntimeError(failed[0])
