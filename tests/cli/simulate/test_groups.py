"""Groups of simulated workers: their reflex swaps layers for all members, by the code of a worker alone."""

from __future__ import annotations

import msgspec
import pytest

from bus.messages import LayerShape
from bus.policy import Policy
from instar.replay.schemas import Arrival
from instar.simulate.calibration import Degree, TransformCosts
from instar.simulate.group_shape import calibration_at
from instar.simulate.grouped import GroupedCluster
from tests.support.simulations import SMALL, burst

# Degree 2 keeps the KV of both workers, and half of the FFNs' pages of each come to it.
PAGES = 2 * (376 + 8 * (178 - 49) // 2)
TWO = msgspec.structs.replace(
    SMALL,
    transform=TransformCosts(degrees={2: Degree(speed=1.5, kv_tokens=PAGES * 47 // 376 * 16)}),
)


def test_a_burst_at_a_group_is_relieved_for_all_members_and_layers_go_back() -> None:
    arrivals = burst(40.0, seconds=5.0, prompt=150, output=100)
    found = GroupedCluster(TWO, 2, Policy(), degrees=(2,))
    found._controller = None  # it would part the group
    found.run(arrivals, 60.0)
    levers = found.record.levers
    assert levers["swap_down", "applied"] and levers["swap_up", "applied"]
    below = [
        sample for sample in found.record.samples if sample["instances"]["small@w0"]["layers_below_full"]
    ]
    assert below
    for sample in below:
        first, other = (sample["instances"][f"small@w{number}"] for number in (0, 1))
        assert first["layers_below_full"] == other["layers_below_full"]
    assert found.record.tally.lost_quality > 0
    for one in found.instances.values():
        assert one.instance.shape.layers == [LayerShape()] * 8
        one.instance.scheduler.check_integrity()
        assert one.instance.scheduler.blocks.num_used == 0
    assert all(one.is_served for one in found.record.outcomes)
    assert all(report.target == "small@w0" for report in found.record.morphs if report.kind == "swap")


def test_a_worker_has_the_blocks_of_its_layers_when_its_group_has_parted() -> None:
    policy = Policy(mode="manual")
    cluster = GroupedCluster(TWO, 2, policy, degrees=(2,))
    group = cluster.groups[0]
    assert group.own
    before = group.own.blocks.capacity
    for half in list(group.own.shape.halves)[:4]:
        group.own.shape.install(half, "int8")
    group.own.shape.resize(pages := group.own.shape.growth())
    group.own.blocks.extend(group.own.shape.kv_blocks)
    group.own.reshaped(0.0)
    assert pages > 0 and group.kv_tokens == 16 * group.own.blocks.capacity > 16 * before
    free = sum(one.scheduler.blocks.num_free for one in group.instances)
    assert free == group.own.blocks.capacity
    cluster.order(["w0", "w1"], 1)
    cluster.run([Arrival(0.0, 50, 50)], 5.0)
    assert len(cluster.groups) == 2
    for one in cluster.instances.values():
        assert one.instance.shape.layers[:2] == [LayerShape(attention="int8", ffn="int8")] * 2
        assert one.instance.blocks.capacity > 47
        assert one.instance.blocks.capacity == one.instance.scheduler.blocks.capacity


@pytest.mark.parametrize("tp", [1, 2])
def test_a_member_has_its_attention_whole_and_a_part_of_its_ffn(tp: int) -> None:
    memory = calibration_at(TWO, tp).memory
    assert memory.attention_pages == SMALL.memory.attention_pages
    ffn = SMALL.memory.layer_pages["int8"] - SMALL.memory.attention_pages["int8"]
    assert memory.layer_pages["int8"] == memory.attention_pages["int8"] + -(-ffn // tp)
    assert memory.kv_pages / memory.kv_blocks == pytest.approx(376 / 47 / tp, rel=0.02)
