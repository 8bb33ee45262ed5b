"""Any sequence of reserve, map, unmap and release conserves pages and keeps every owner's data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.support.memory_backends import BackendFactory, cpu, cuda, needs_cuda
from worker.memory import OutOfPages, PagePool, VirtualRange

PAGES = 12
RANGE_PAGES = 8


class PoolMachine(RuleBasedStateMachine):
    """`stamps` is the model: (range, page) -> the number written over the whole page, 0 after mapping."""

    factory: BackendFactory = staticmethod(cpu)
    ranges: Bundle[VirtualRange] = Bundle("ranges")

    def __init__(self) -> None:
        super().__init__()
        backend = self.factory()
        self.pool = PagePool(backend, PAGES * backend.page_bytes)
        self.stamps: dict[tuple[VirtualRange, int], int] = {}
        self.written = 0

    @rule(target=ranges, kind=st.sampled_from(["weights", "kv"]))
    def reserve(self, kind: str) -> VirtualRange:
        nbytes = RANGE_PAGES * self.pool.page_bytes
        return self.pool.reserve(nbytes, kind=kind, owner=kind)  # type: ignore[arg-type]

    @rule(owned=ranges, first=st.integers(0, RANGE_PAGES - 1), n=st.integers(1, RANGE_PAGES))
    def map(self, owned: VirtualRange, first: int, n: int) -> None:
        pages = range(first, first + n)
        if first + n > RANGE_PAGES or any((owned, i) in self.stamps for i in pages):
            with pytest.raises(ValueError):
                owned.map(first, n)
        elif n > PAGES - len(self.stamps):
            with pytest.raises(OutOfPages):
                owned.map(first, n)
        else:
            owned.map(first, n)
            self.stamps.update({(owned, i): 0 for i in pages})

    @rule(owned=ranges, first=st.integers(0, RANGE_PAGES - 1), n=st.integers(1, RANGE_PAGES))
    def unmap(self, owned: VirtualRange, first: int, n: int) -> None:
        pages = range(first, first + n)
        if all((owned, i) in self.stamps for i in pages):
            owned.unmap(first, n)
            for i in pages:
                del self.stamps[owned, i]
        else:
            with pytest.raises(ValueError):
                owned.unmap(first, n)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        if self.stamps:
            owned, i = data.draw(st.sampled_from(sorted(self.stamps, key=lambda at: (id(at[0]), at[1]))))
            self.written += 1
            self.view(owned, i).fill_(self.written)
            self.stamps[owned, i] = self.written

    @rule(owned=consumes(ranges))
    def release(self, owned: VirtualRange) -> None:
        owned.release()
        self.stamps = {at: stamp for at, stamp in self.stamps.items() if at[0] is not owned}

    @invariant()
    def pages_are_conserved_and_have_one_owner(self) -> None:
        self.pool.check_integrity()
        now = self.pool.counts()
        assert now.weights + now.kv + now.free == now.budget == PAGES
        assert now.weights == sum(owned.kind == "weights" for owned, _ in self.stamps)
        assert now.kv == sum(owned.kind == "kv" for owned, _ in self.stamps)

    @invariant()
    def every_page_holds_what_its_owner_wrote(self) -> None:
        for (owned, i), stamp in self.stamps.items():
            assert self.view(owned, i).eq(stamp).all()

    def view(self, owned: VirtualRange, i: int) -> torch.Tensor:
        size = self.pool.page_bytes
        return owned.tensor(torch.int32, [size // 4], offset_bytes=i * size)

    def teardown(self) -> None:
        self.pool.close()


class CudaPoolMachine(PoolMachine):
    factory: BackendFactory = staticmethod(cuda)


SETTINGS = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

TestPoolOnCpu = PoolMachine.TestCase
TestPoolOnCpu.settings = SETTINGS

TestPoolOnCuda = pytest.mark.gpu(needs_cuda(CudaPoolMachine.TestCase))
TestPoolOnCuda.settings = SETTINGS
