"""Calls as CUDA graphs, and graphs joined to one (CUDA C++ Programming Guide, "CUDA Graphs")."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from worker.model.step_parts import Run


class CudaGraphs:
    """Records calls as CUDA graphs.

    All share one pool of memory, which holds only what passes within a part: parts run one after the other on
    one stream. Other threads may use the device meanwhile, but not wait for all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Run, torch.cuda.CUDAGraph] = {}  # by what runs them
        self._begin()

    def __call__(self, run: Run) -> Run:
        """Raise RuntimeError if something in `run` cannot be captured."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # as `join` needs it
        try:
            with _no_collection(), torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            graph.instantiate()
        except BaseException:
            # A capture that failed does not end torch's allocations to its pool.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            self._begin()
            raise
        replay: Run = graph.replay
        self._graphs[replay] = graph
        return replay

    def join(self, recordings: Sequence[Run]) -> Run:
        """Make one graph that runs recordings made here, one after the other. Raises MappingFailed.

        It has nodes of its own, which launch the same kernels with the same arguments.
        """
        return _JoinedGraph([self._graphs[one].raw_cuda_graph() for one in recordings])

    def _begin(self) -> None:
        self._stream = torch.cuda.Stream(self._device)  # the default stream cannot be captured
        self._pool = torch.cuda.graph_pool_handle()


class _JoinedGraph:
    """A graph of graphs in a row, made and launched by the driver: torch cannot add to a graph."""

    def __init__(self, graphs: Sequence[int]) -> None:
        """graphs: addresses of cudaGraph_t, which are copied."""
        from cuda.bindings import driver  # exist only where CUDA does

        from worker.memory.driver import check

        self._check, self._driver = check, driver
        joined, last = check(driver.cuGraphCreate(0)), list[Any]()
        try:
            for graph in graphs:
                child = driver.CUgraph(graph)
                last = [check(driver.cuGraphAddChildGraphNode(joined, last, len(last), child))]
            self._graph = check(driver.cuGraphInstantiate(joined, 0))
        finally:
            check(driver.cuGraphDestroy(joined))
        # One that still runs is freed at its end. Not at exit: the driver shuts down then.
        weakref.finalize(self, driver.cuGraphExecDestroy, self._graph).atexit = False
        self._check(driver.cuGraphUpload(self._graph, _stream()))

    def __call__(self) -> None:
        self._check(self._driver.cuGraphLaunch(self._graph, _stream()))


def _stream() -> int:
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing device memory in the middle, which ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
