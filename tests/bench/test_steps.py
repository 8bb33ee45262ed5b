"""`bench.engine steps` over the real service, small."""

from __future__ import annotations

import pytest

from bench.common.results import DEMO
from bench.engine.steps import PARTS, SETTINGS, WAY, WatchedService, cores_of, measure, parts_of, way_of

pytestmark = pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="models/demo is not built")

TOKENS = 40


@pytest.mark.slow
@pytest.mark.parametrize("product_kernel", ["", pytest.param("torch", marks=pytest.mark.slow)])
def test_every_part_of_a_token_is_told_whatever_kernel_its_products_have(product_kernel: str) -> None:
    settings = SETTINGS | {"WORKER__PRODUCT_KERNEL": product_kernel, "WORKER__MEMORY_MB": "512"}
    with WatchedService(model=DEMO, settings=settings) as service:
        run = measure(service, streams=2, tokens=TOKENS)
    parts = parts_of(run)
    for i, token in enumerate(parts["token"]):
        assert sum(parts[name][i] for name in PARTS) == pytest.approx(token)
    never = {name for name in PARTS if not any(parts[name])}
    assert never == ({"launch", "lock", "watch"} if product_kernel == "torch" else set())
    assert all(value > -1e-4 for name in PARTS for value in parts[name]), "the clocks agree"
    way = way_of(run)
    assert all(value > 0 for name in WAY for value in way[name]), "no token arrives before it was sent"
    assert len(way["socket"]) >= TOKENS // 2
    cores = cores_of(run)
    assert cores["engine's thread"] > cores["gateway"] > cores["gateway, text"] > 0
    assert cores["worker's event loop"] > cores["worker's event loop, outputs"] > 0
    assert cores["redis"] > 0 and cores["client"] > 0 and cores["monitor, controller"] > 0
