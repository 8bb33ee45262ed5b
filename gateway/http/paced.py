"""Long answers, sent piece by piece: a client that does not read holds one piece, not the whole."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE: Final = 32 * 1024


class PacedResponse(Response):
    """A response that sends a piece of its body when the client has taken most of the one before."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head and body."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = bytes(self.body)
        for at in range(0, max(1, len(body)), PIECE):
            is_last = at + PIECE >= len(body)
            await send(
                {"type": "http.response.body", "body": body[at : at + PIECE], "more_body": not is_last}
            )
