"""Swaps of layers and halves, on a toy model over real pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bus.messages import LayerShape, MorphReport, Swap
from tests.morph_toys import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.check_integrity()
    made.close()


def swap(rig: Rig, precision: Any, name: str = "m", **fields: Any) -> None:
    rig.executor.begin(Swap(id=name, epoch=0, instance="toy@w0", precision=precision, **fields))


def ended(rig: Rig) -> MorphReport:
    (report,) = rig.settle()
    return report


def test_a_layer_goes_down_and_its_pages_become_blocks(rig: Rig) -> None:
    blocks, pages = rig.cache.num_blocks, rig.pool.counts()
    swap(rig, "int4", layers=[1])
    assert [report.state for report in rig.advance()][:1] == ["running"]
    report = ended(rig)
    assert (report.state, report.reason) == ("applied", "")
    assert rig.instance.shape == [LayerShape(), LayerShape(attention="int4", ffn="int4")]
    freed = (6 + 2) - (2 + 1)
    after = rig.pool.counts()
    assert after.weights == pages.weights - freed
    assert after.kv == pages.kv + freed // 2 * 2 and after.free >= rig.reserve
    assert rig.cache.num_blocks > blocks
    assert report.numbers["blocks_after"] == rig.cache.num_blocks
    assert report.numbers["bytes_copied"] == 3 * 4096
