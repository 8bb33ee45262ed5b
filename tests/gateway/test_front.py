"""The wrapper of every request: its id, and an answer to unforeseen errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import FastAPI

from gateway.app import Front, guarded
from gateway.http.body import Message, Receive, Scope, Send


async def _fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("nobody foresaw this")


async def test_a_failure_is_logged_with_the_id_that_the_client_was_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/x\ny", "headers": []}
    with caplog.at_level(logging.ERROR, "gateway"), pytest.raises(RuntimeError, match="nobody foresaw"):
        await Front(FastAPI(), {"/x\ny": guarded(_fails)})(scope, receive, send)
    assert sent[0]["status"] == 500
    told = dict(sent[0]["headers"])[b"x-request-id"].decode()
    assert [record.getMessage() for record in caplog.records] == [f"request {told} failed: POST '/x\\ny'"]
