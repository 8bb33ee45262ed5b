"""Two real workers, each too small for a long request: it comes, they become one by themselves, serve it
beside short ones, and part again. Nobody gives an order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.common.service import LEASE_S, Service, wait_for
from tests.faults.load import LONG_STREAM, Stream, complete
from tests.support.paths import DEMO_MODEL

pytestmark = [
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.faults,
    pytest.mark.slow,
]

LONG = LONG_STREAM | {"max_tokens": 650}
SHORT = LONG_STREAM | {"max_tokens": 30}
FAST = {"MONITOR__INTERVAL_S": "0.1", "WORKER__TELEMETRY_S": "0.1", "WORKER__LEASE_S": str(4 * LEASE_S)}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """640 tokens of KV in each, 2048 in both together. With variants a swap would be the cheaper way."""
    only_full = {"WORKER__MEMORY_MB": "34", "WORKER__VARIANTS": "[]"}
    with Service(num_workers=2, settings=FAST | only_full) as service:
        service.set_policy(windows=2, cooldown_s=0.5)
        yield service


def shape(service: Service) -> list[int]:
    return [one["tp"] for one in service.state()["instances"]]


def decided(service: Service) -> list[dict[str, Any]]:
    return [one for one in service.state()["morphs"] if one["kind"] == "transform"]


def test_a_long_request_makes_a_group_and_its_end_parts_it(service: Service) -> None:
    with service.explained():
        assert shape(service) == [1, 1]
        short = [Stream(service, SHORT).start() for _ in range(2)]
        began_s = time.monotonic()
        long = Stream(service, LONG).start().wait_chunks(1)
        waited_s = time.monotonic() - began_s
        wait_for("one group, as both members show it", lambda: shape(service) == [2])
        short += [Stream(service, SHORT).start() for _ in range(2)]
        assert [stream.finished().error for stream in (long, *short)] == [None] * 5
        assert long.usage is None or long.usage.completion_tokens == 650
        assert len({stream.text for stream in short}) == 1
        wait_for("two instances again", lambda: shape(service) == [1, 1])
        up, down = decided(service)
        assert (up["state"], up["numbers"]["tp_after"]) == ("applied", 2)
        assert (down["state"], down["numbers"]["tp_after"]) == ("applied", 1)
        assert "waits and no instance has room for it" in up["decided"]
        assert "no long request is left" in down["decided"]
        assert service.metric("instar_recomputed_tokens_total") == 0
        assert waited_s < 10


def test_what_no_shape_holds_is_refused_at_once(service: Service) -> None:
    with pytest.raises(openai.BadRequestError, match="context holds 2048 tokens"):
        complete(service, max_tokens=2048)
    wait_for("two instances again", lambda: shape(service) == [1, 1])
