"""The ledger makes late, doubled and overtaken messages harmless."""

from __future__ import annotations

from typing import Any

from bus.messages import SamplingParams, Submit
from worker.service import ledger as ledger_module
from worker.service.ledger import Ledger


def submit(name: str = "r", **changes: Any) -> Submit:
    fields: dict[str, Any] = {
        "request_id": name,
        "attempt": 1,
        "gateway": "g0",
        "epoch": 7,
        "prompt_token_ids": [1],
        "sampling": SamplingParams(max_tokens=1, seed=0),
    }
    return Submit(**{**fields, **changes})


def test_only_submits_of_the_own_epoch_run() -> None:
    ledger = Ledger()
    assert not ledger.offer(submit(epoch=6), "i", "1-0", 7).run
    assert "addressed to epoch 8" in ledger.offer(submit(epoch=8), "i", "1-0", 7).reason
    assert ledger.offer(submit(), "i", "1-0", 7).run
    assert ledger.gateways() == {"g0"}


def test_the_same_or_an_older_attempt_is_ignored_and_a_newer_one_replaces() -> None:
    ledger = Ledger()
    ledger.offer(submit(attempt=2), "i", "1-0", 7)
    assert not ledger.offer(submit(attempt=2), "i", "2-0", 7).run
    assert not ledger.offer(submit(attempt=1), "i", "3-0", 7).run
    verdict = ledger.offer(submit(attempt=3), "i", "4-0", 7)
    assert verdict.run and verdict.replaced and verdict.replaced.entry_id == "1-0"
    assert ledger.end("r", 2) is None, "the end of an aborted attempt says nothing about the new one"
    ticket = ledger.end("r", 3)
    assert ticket and ticket.entry_id == "4-0"
    assert len(ledger) == 0


def test_an_entry_that_is_read_again_while_its_request_runs_stays_in_use() -> None:
    ledger = Ledger()
    ledger.offer(submit(), "i", "1-0", 7)
    assert not ledger.offer(submit(), "i", "1-0", 7).run and ledger.is_open("i", "1-0")
    assert not ledger.offer(submit(), "i", "2-0", 7).run and not ledger.is_open("i", "2-0")


def test_an_entry_of_several_requests_is_in_use_until_the_last_has_gone() -> None:
    ledger = Ledger()
    for name in ("a", "b", "c", "d"):
        assert ledger.offer(submit(name), "i", "1-0", 7).run
    ledger.offer(submit("a", attempt=2), "i", "2-0", 7)  # a retry has an entry of its own
    ledger.end("b", 1)
    ledger.cancel("c")
    assert ledger.is_open("i", "1-0") and ledger.is_open("i", "2-0")
    ledger.end("d", 1)
    assert not ledger.is_open("i", "1-0") and not ledger.is_open("other", "2-0")
    ledger.drop_gateway("g0")
    assert not ledger.is_open("i", "2-0")


def test_an_attempt_that_has_ended_does_not_run_again_and_a_later_one_does() -> None:
    ledger = Ledger()
    ledger.offer(submit(attempt=2), "i", "1-0", 7)
    ledger.end("r", 2)
    again = ledger.offer(submit(attempt=2), "i", "1-0", 7)
    assert not again.run and not ledger.is_open("i", "1-0")
    assert ledger.offer(submit(attempt=3), "i", "2-0", 7).run


def test_a_cancel_that_overtook_its_submit_still_cancels() -> None:
    ledger = Ledger()
    assert ledger.cancel("r") is None
    verdict = ledger.offer(submit(), "i", "1-0", 7)
    assert not verdict.run and verdict.reason == "cancelled before it came"


def test_a_cancel_gives_the_ticket_back_once() -> None:
    ledger = Ledger()
    ledger.offer(submit(), "i", "1-0", 7)
    ticket = ledger.cancel("r")
    assert ticket and ticket.entry_id == "1-0"
    assert ledger.cancel("r") is None


def test_a_new_epoch_forgets_tickets_and_keeps_cancellations() -> None:
    ledger = Ledger()
    ledger.offer(submit(), "i", "1-0", 7)
    ledger.cancel("gone")
    ledger.clear()
    assert ledger.get("r") is None
    assert not ledger.offer(submit("gone", epoch=8), "i", "2-0", 8).run


def test_remembered_cancellations_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(ledger_module, "MAX_REMEMBERED", 2)
    ledger = Ledger()
    for name in ("a", "b", "c"):
        ledger.cancel(name)
    assert ledger.offer(submit("a"), "i", "1-0", 7).run
    assert not ledger.offer(submit("c"), "i", "2-0", 7).run


def test_requests_of_a_gateway_that_is_gone_are_dropped_and_run_when_it_asks_again() -> None:
    ledger = Ledger()
    for name, gateway in (("a", "g0"), ("b", "g1"), ("c", "g0")):
        ledger.offer(submit(name, gateway=gateway), "i", "1-0", 7)
    assert [ticket.request_id for ticket in ledger.drop_gateway("g0")] == ["a", "c"]
    assert ledger.gateways() == {"g1"}
    assert ledger.offer(submit("a", attempt=2), "i", "2-0", 7).run


def test_a_cancel_of_earlier_attempts_lets_a_later_one_run() -> None:
    ledger = Ledger()
    ledger.offer(submit(attempt=2), "i", "1-0", 7)
    assert ledger.cancel("r", up_to_attempt=1) is None
    ticket = ledger.cancel("r", up_to_attempt=2)
    assert ticket and ticket.attempt == 2
    assert not ledger.offer(submit(attempt=2), "i", "2-0", 7).run
    assert ledger.offer(submit(attempt=3), "i", "3-0", 7).run


def test_a_cancel_of_all_attempts_is_not_weakened_by_one_of_earlier_attempts() -> None:
    ledger = Ledger()
    ledger.cancel("r")
    ledger.cancel("r", up_to_attempt=1)
    assert not ledger.offer(submit(attempt=5), "i", "1-0", 7).run
