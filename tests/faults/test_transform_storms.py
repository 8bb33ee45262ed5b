"""Four workers that become one, two, four instances and back: one of them is killed, and storms of every kind
of morph: faults 11 and 13 of docs/faults.md. STORM_S says how many seconds a storm lasts."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.faults.load import Load
from tests.faults.morph_storm import MorphStorm
from tests.faults.morphs import NUM_LAYERS
from tests.faults.transforms import Shapes, serving

STORM_S = float(os.environ.get("STORM_S", "8"))
STORMY = {"WORKER__MORPH_SHARE": "0.5", "WORKER__LEASE_S": "10"}
SLOPE_FROM_S, MOST_MIB_PER_MINUTE = 120, 2.0

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(STORM_S + 600)]
Report = Callable[[dict[str, Any]], None]


class ShapeStorm(MorphStorm):
    """Orders go to any worker's instance, also of one that is not there while it is a part of another."""

    def _order(self, rng: random.Random) -> None:
        self._hand.instance = f"demo@w{rng.randrange(self.service.num_workers)}"
        super()._order(rng)

    def _swap(self, rng: random.Random) -> dict[str, Any]:
        """Swap all layers to one of two: workers whose layers differ become no group."""
        precision = rng.choice(("full", "int8"))
        return self._hand.swap(precision, wait=False, count=NUM_LAYERS, wait_s=rng.choice((0.2, 1.0)))

    def _transform(self, rng: random.Random) -> dict[str, Any]:
        """One that could be: two instances of one degree become one, or one parts, half or all the way."""
        instances = [one["workers"] for one in self.service.state()["instances"]]
        one = rng.choice(instances)
        alike = [other for other in instances if len(other) == len(one) and other != one]
        if alike and (len(one) == 1 or rng.random() < 0.5):
            workers, tp = one + rng.choice(alike), 2 * len(one)
        else:
            workers, tp = one, rng.choice((1, max(1, len(one) // 2)))
        return self._to_degree(rng, workers, tp)

    def _to_degree(self, rng: random.Random, workers: list[str], tp: int) -> dict[str, Any]:
        body = {"workers": workers, "tp": tp, "layers_per_step": rng.choice((1, 3, NUM_LAYERS))}
        url = f"{self.service.url()}/admin/instances/transform"
        return dict(httpx.post(url, json=body, timeout=20).json())


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shapes]:
    with serving(tmp_path_factory.mktemp("host"), STORMY, num_workers=4) as shapes:
        yield shapes


def calm(shapes: Shapes) -> None:
    """Everybody alone, at full precision, with as many blocks as at the beginning."""
    for workers in shapes.shape():
        shapes.apply(1, *workers)
    for name in shapes.workers:
        hand = shapes.hand(name)
        for end in (
            hand.swap("full", count=NUM_LAYERS, wait_s=20),
            hand.resize(shapes.blocks[name], wait_s=20),
        ):
            assert end.get("state") == "applied", end
    shapes.assert_whole()


@pytest.mark.parametrize("victim", ["w0", "w3"])
@pytest.mark.parametrize("layers", [0, 3, NUM_LAYERS])
def test_one_of_four_killed_leaves_three_that_serve(
    four: Shapes, layers: int, victim: str, report: Report
) -> None:
    """Two groups of two become one of four. The shards of the first are its first and third."""
    service = four.service
    with service.explained():
        four.apply(2, "w0", "w1")
        four.apply(2, "w2", "w3")
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = four.streams()
            order = four.upwards("w0", "w1", "w2", "w3", layers=layers)
            load.mark()
            service.processes[victim].kill()
            load.recover(3)
            four.assert_exact(streams)
        assert load.failed == []
        assert order.end()["state"] == "failed" or layers == NUM_LAYERS
        four.mend()
        four.assert_whole_again()
    report(load.row(f"11 kill -9 {victim} of four, {layers} layers done"))


@pytest.mark.parametrize(
    "kinds",
    [
        ("transform", "cancel"),
        ("transform", "transform", "swap", "resize", "cancel", "nonsense"),
    ],
    ids=["of shapes", "of everything"],
)
def test_a_storm_loses_no_request_and_leaves_no_trace(
    four: Shapes, kinds: tuple[str, ...], report: Report
) -> None:
    service = four.service
    with service.explained():
        before = four.recomputed()
        with Load(service, clients=2) as load:
            load.warm(5)
            with ShapeStorm(service, kinds=kinds, hands=2, readers=3) as storm:
                load.mark()
                storm.rage(STORM_S)
            load.recover(5)
        assert load.failed == []
        assert storm.streams > 0 and storm.answers["applied"] > 0, storm.told()
        fell = [why for why in storm.reasons if "fell apart" in why or "the new shape is off" in why]
        assert not fell, storm.told()
        if "swap" not in kinds:
            assert four.recomputed() == before
        calm(four)
        streams = four.streams()
        four.assert_exact(streams)
        if STORM_S >= SLOPE_FROM_S:
            slopes = {name: slope for name, (slope, _) in storm.memory.growth().items()}
            assert max(slopes.values()) < MOST_MIB_PER_MINUTE, slopes
    row = load.row(f"13 {sum(storm.answers.values())} morphs of four workers in {STORM_S:.0f} s")
    report(row | {"told": storm.told()})
