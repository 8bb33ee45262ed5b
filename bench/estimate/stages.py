"""A whole model in stages, for `bench.estimate`: a process of its own for each, this one has the first."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.engine.stage_processes import TIMEOUT_S, Stage, StageProcesses, Staging, lead
from bench.estimate.truth import Prompts, Running, request
from bus.deployments import Configuration, ProbePeer
from bus.precisions import Precision


class Stages:
    """`peer`: a worker to measure with what stages and ranks say to each other."""

    def __init__(self, staging: Staging) -> None:
        self.shape = Configuration(pp=len(staging.parts))
        self._woken = threading.Event()
        self._num_requests = 0
        self._processes = StageProcesses(staging)
        try:
            self._stage = Stage(staging, 0)
            behind = self._processes.wait()
            with torch.inference_mode():
                self._instance = lead(self._stage, behind, self._woken)
        except BaseException:
            self._processes.close()
            raise
        self.peer = ProbePeer(worker=behind[0].worker, link=behind[0].address, link_key=behind[0].key)

    def use(self, precision: Precision) -> None:
        self._stage.use(precision)
        self._instance.reshaped()
        self._processes.ask("use", precision)

    def run(self, prompts: Prompts, output_tokens: int) -> Running:
        began = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            self._instance.submit(request(str(self._num_requests), prompt, output_tokens))
        self._run()
        took = time.perf_counter() - began
        yield
        return took

    def activation_bytes(self, prompts: Prompts) -> Generator[None, None, int]:
        self._stage.watch()
        self._processes.ask("watch")
        yield from self.run(prompts, 2)
        others: list[int] = self._processes.ask("peak_bytes")
        return self._stage.peak_bytes() + sum(others)

    def weight_bytes(self, precision: Precision) -> int:
        others: list[int] = self._processes.ask("weight_bytes", precision)
        return self._stage.weight_bytes(precision) + sum(others)

    def kv_bytes(self, num_blocks: int) -> int:
        others: list[int] = self._processes.ask("kv_bytes", num_blocks)
        return self._stage.kv_bytes(num_blocks) + sum(others)

    def close(self) -> None:
        self._instance.close()
        self._processes.close()
        self._stage.release()

    def _run(self) -> None:
        """Raises RuntimeError where stages do not get on."""
        instance = self._instance
        while instance.has_work:
            if not instance.can_step:
                if not self._woken.wait(TIMEOUT_S):
                    raise RuntimeError(f"no stage has answered in {TIMEOUT_S:g} s")
                self._woken.clear()
                continue
            with self._stage.watched(), torch.inference_mode():
                outputs = instance.step()
            if failed := [one.delta.error for one in outputs if one.delta.error]:
                raise RuntimeError(failed[0])
