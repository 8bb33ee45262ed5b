"""The system refuses memory in the middle of a morph of the demo model (fault 12 of docs/faults.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.memory_faults import FaultyLinux
from tests.test_morph_demo import DEVICE, NUM_NEW, PROMPTS, Morphing

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="refuses calls of the CPU's pages"),
]
EVER = 1_000_000


@pytest.fixture(scope="module")
def host_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultyLinux:
    return FaultyLinux(monkeypatch)


@pytest.fixture
def morphing(host_dir: Path, faults: FaultyLinux) -> Iterator[Morphing]:
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
    faults: FaultyLinux,
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
    faults.arm(first, count)
    name = order(morphing)
    morphing.finish()
    assert faults.has_struck
    faults.disarm()
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
