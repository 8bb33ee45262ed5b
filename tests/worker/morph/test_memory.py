"""The system refuses memory in the middle of a morph of the demo model (fault 12 of docs/faults.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.worker.engine.test_oracle import DEVICE
from tests.worker.morph.test_demo import NUM_NEW, PROMPTS, Morphing
from worker.memory import CpuBackend, MappingFailed
from worker.memory.backend import AddressSpace, PageNumbers

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="refuses calls of the CPU's pages"),
]
EVER = 1_000_000


@pytest.fixture(scope="module")
def host_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


class Refusals:
    """Maps of the real system, counted, of which chosen ones are refused."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_maps, self.refused = 0, range(0)
        real = CpuBackend.map

        def map_or_refuse(
            backend: CpuBackend, space: AddressSpace, first: int, pages: PageNumbers, *, zeroed: bool
        ) -> None:
            self.num_maps += 1
            if self.num_maps in self.refused:
                raise MappingFailed("mmap: Cannot allocate memory")
            real(backend, space, first, pages, zeroed=zeroed)

        patch.setattr(CpuBackend, "map", map_or_refuse)

    def arm(self, first: int, count: int) -> None:
        self.num_maps, self.refused = 0, range(first, first + count)

    @property
    def have_struck(self) -> bool:
        return self.num_maps >= self.refused.start


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    return Refusals(monkeypatch)


@pytest.fixture
def morphing(host_dir: Path, refusals: Refusals) -> Iterator[Morphing]:
    made = Morphing(host_dir)
    yield made
    made.close()


def undisturbed(morphing: Morphing) -> list[int]:
    morphing.submit("undisturbed", PROMPTS[1])
    morphing.finish()
    return morphing.client.tokens["undisturbed"]


def swap(morphing: Morphing) -> str:
    return morphing.swap("int4", count=3)


def grow(morphing: Morphing) -> str:
    return morphing.resize(morphing.cache.num_blocks + 40)


@pytest.mark.parametrize("order", [swap, grow], ids=["swap", "grow"])
@pytest.mark.parametrize(("first", "count"), [(1, EVER), (3, 1), (4, EVER)], ids=["all", "one", "later"])
def test_a_map_that_the_system_refuses_fails_the_morph_and_streams_do_not_notice(
    morphing: Morphing,
    refusals: Refusals,
    order: Callable[[Morphing], str],
    first: int,
    count: int,
) -> None:
    expected, blocks = undisturbed(morphing), morphing.cache.num_blocks
    if order is grow:
        morphing.resize(blocks - 41)
        morphing.finish()
    pages = morphing.pool.counts()
    morphing.submit("during", PROMPTS[1])
    morphing.steps(5)
    refusals.arm(first, count)
    name = order(morphing)
    morphing.finish()
    assert refusals.have_struck
    refusals.arm(1, 0)
    report = morphing.ends[name]
    assert report.state == "failed" and "MappingFailed" in report.reason, report
    applied = report.numbers.get("halves_applied", 0)
    assert (
        morphing.client.tokens["during"][: 5 if applied else NUM_NEW] == expected[: 5 if applied else NUM_NEW]
    )
    if not applied:
        assert morphing.pool.counts() == pages
    again = order(morphing)
    morphing.finish()
    assert morphing.ends[again].state == "applied"
    morphing.now("full", layers=list(range(morphing.num_layers)))
    morphing.submit("after", PROMPTS[1])
    morphing.finish()
    assert morphing.client.tokens["after"] == expected
