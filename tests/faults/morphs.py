"""An operator's hand on a service under test, and streams that say in which shape they were made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.common.service import Service, wait_for
from bus.codec import decode
from bus.messages import Event
from bus.morphs import MorphReport
from bus.names import Names
from tests.faults.load import Stream

NUM_LAYERS = 8  # of models/demo
ENDED_S = 90.0  # within which an order ends
COMPILED_S = 300.0  # and one that compiles kernels, on a busy machine
FULL = {"attention": "full", "ffn": "full"}
TOKENS = {"frequency_penalty": 0.5, "logprobs": 0}
SHAPED = {"extra_body": {"ignore_eos": True, "return_precision": True}}

# Numbers that are young enough to be asserted on. A machine that is busy is not a worker that is dead.
QUICK_NUMBERS = {
    "MONITOR__INTERVAL_S": "0.1",
    "MONITOR__IDLE_INTERVAL_S": "0.2",
    "WORKER__TELEMETRY_S": "0.1",
    "WORKER__IDLE_TELEMETRY_S": "0.3",
    "WORKER__LEASE_S": "6",
    "WORKER__QUANTIZATION": "rtn",
}
# models/demo takes 28 MB in full precision: its KV cache is then about 70 blocks, in int4 three times that.
SMALL_BUDGET = {
    "WORKER__MEMORY_MB": "37",
    "WORKER__PAGE_KIB": "16",
    "WORKER__MAX_TP": "1",
    "WORKER__MAX_MODEL_LEN": "512",
}


def settings(host_dir: Path, *more: Mapping[str, str]) -> dict[str, str]:
    """Start a service with host images of the test's own, which it may damage and count."""
    merged = QUICK_NUMBERS | {"WORKER__HOST_DIR": str(host_dir)}
    for one in more:
        merged |= one
    return merged


@dataclass
class Hand:
    """Orders to one instance. Orders wait for their end unless they say `wait=False`; answers are the
    service's JSON, errors included."""

    service: Service
    instance: str = "demo@w0"
    gateway: int = 0

    def manual(self) -> Hand:
        """Set the policy so that nothing else morphs."""
        return self.policy(mode="manual")

    def policy(self, **changes: Any) -> Hand:
        answer = httpx.put(self._url("policy"), json=changes, timeout=20)
        assert answer.status_code == 200, answer.text
        return self

    def swap(self, precision: str, *, wait: bool = True, **which: Any) -> dict[str, Any]:
        """`which`: layers or count, parts, wait_s."""
        return self.order("swap", {"precision": precision} | which, wait=wait)

    def resize(self, blocks: int, *, wait: bool = True, **more: Any) -> dict[str, Any]:
        return self.order("resize", {"blocks": blocks} | more, wait=wait)

    def convert(self, kv_dtype: str, *, wait: bool = True, **more: Any) -> dict[str, Any]:
        """Convert its KV cache, for which the kernels may have to be compiled first."""
        return self.order("kv", {"kv_dtype": kv_dtype} | more, wait=wait, within_s=COMPILED_S)

    def order(
        self, kind: str, body: dict[str, Any], *, wait: bool = False, within_s: float = ENDED_S
    ) -> dict[str, Any]:
        answer = httpx.post(self._url(f"instances/{self.instance}/{kind}"), json=body, timeout=20).json()
        return self.ended(answer["id"], within_s) if wait and "id" in answer else dict(answer)

    def cancel(self, morph_id: str) -> dict[str, Any]:
        return dict(httpx.delete(self._url(f"morphs/{morph_id}"), timeout=20).json())

    def ended(self, morph_id: str, within_s: float = ENDED_S) -> dict[str, Any]:
        """Return the end of the morph."""

        def look() -> dict[str, Any] | None:
            morph = dict(httpx.get(self._url(f"morphs/{morph_id}"), timeout=60).json())
            return None if morph["state"] == "running" else morph

        return dict(wait_for(f"morph {morph_id} to end", look, within_s, every_s=0.1))

    # ---------------------------------------------------------------- looking at it

    def look(self) -> dict[str, Any]:
        """The instance as /admin/state has it."""
        found = [i for i in self.service.state(self.gateway)["instances"] if i["id"] == self.instance]
        return dict(found[0]) if found else {}

    def pages(self) -> dict[str, int]:
        """Return the pages of the instance's worker, which must have reported."""
        worker = self.instance.partition("@")[2]

        def find() -> dict[str, int] | None:
            found = [w["pages"] for w in self.service.state(self.gateway)["workers"] if w["id"] == worker]
            return found[0] if found else None

        pages = dict(wait_for(f"{worker} to report its pages", find))
        assert pages["weights"] + pages["kv"] + pages["free"] == pages["budget"], pages
        return pages

    def preemptions(self) -> int:
        found = self.service.state(self.gateway)["metrics"]["instances"]
        return sum(int(i["last"]["preemptions"]) for i in found if i["id"] == self.instance)

    def is_full(self) -> bool:
        return bool(self.look().get("layers") == [FULL] * NUM_LAYERS)

    def wait_idle(self) -> None:
        wait_for("every block to be free", lambda: self.service.blocks_used(self.gateway) == 0, 30)

    def _url(self, path: str) -> str:
        return f"{self.service.url(self.gateway)}/admin/{path}"


@dataclass
class ShapedStream(Stream):
    """`spans`: of the answer, which layers were below full when its tokens were made."""

    spans: list[dict[str, Any]] = field(default_factory=list)

    def _take(self, choice: Any) -> None:
        super()._take(choice)
        self.spans = getattr(choice, "precision", None) or self.spans

    @property
    def tokens(self) -> list[str]:
        return [token for token, _ in self.logprobs]

    @property
    def num_exact(self) -> int:
        """Tokens before the first that a layer below full had a part in."""
        first = self.spans[0]
        return 0 if first["layers_below_full"] else int(first["end"])


def stream(service: Service, max_tokens: int = 160, gateway: int = 0, **more: Any) -> ShapedStream:
    """Started. Greedy, to its full length, with its tokens and their shape."""
    extra = {"extra_body": SHAPED["extra_body"] | more.pop("extra_body", {})}
    params = TOKENS | {"max_tokens": max_tokens} | extra
    return ShapedStream(service, params, gateway, **more).start()


def assert_complete(one: ShapedStream, max_tokens: int) -> None:
    assert one.error is None, one.error
    assert one.finish == {0: "length"}
    assert len(one.tokens) == one.usage.completion_tokens == max_tokens
    assert one.spans[0]["start"] == 0 and one.spans[-1]["end"] == max_tokens


def assert_exact_while_full(one: ShapedStream, oracle: list[str]) -> None:
    """Check that its first tokens, made at full precision, are the oracle's."""
    exact = min(one.num_exact, len(oracle))
    assert one.tokens[:exact] == oracle[:exact]


def told(service: Service) -> list[tuple[float, Event | MorphReport]]:
    """All decisions and reports on the stream of events, each with its time of arrival in seconds."""
    found = []
    with service.redis as client:
        entries: Any = client.xrange(Names("instar:").events)
    for entry_id, fields in entries:
        message = decode(fields[b"m"])
        if isinstance(message, Event | MorphReport):
            found.append((int(entry_id.split(b"-")[0]) / 1e3, message))
    return found


def decisions(service: Service) -> list[Event]:
    """Return the morphs that the reflex decided by itself."""
    return [
        message
        for _, message in told(service)
        if isinstance(message, Event) and message.morph_id.startswith("reflex-")
    ]
