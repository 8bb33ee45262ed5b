"""Serve the dashboard's files, read once at the start, from memory.

So no path leads out of the folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

FOLDER: Final = Path(__file__).resolve().parents[1] / "dashboard"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PLAIN: Final = "text/plain; charset=utf-8"
# The page loads and calls nothing but this gateway, and no other page may frame it. `no-cache`: browsers ask
# each time and get 304 while nothing changed, so that no page mixes two versions.
HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    media_type: str
    etag: str


class Pages:
    """The files by their path below the folder: "index.html", "vendor/uplot/LICENSE"."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self._pages = {path.relative_to(folder).as_posix(): _read(path) for path in files}

    def answer(self, request: Request, name: str) -> Response | None:
        """Return a file (200) or that it has not changed (304), without a body for HEAD; None if absent."""
        page = self._pages.get(name)
        if page is None:
            return None
        headers = HEADERS | {"etag": page.etag}
        if _has(request, page.etag):
            return Response(status_code=304, headers=headers)
        return Response(page.body, headers=headers, media_type=page.media_type)


def _read(path: Path) -> Page:
    body = path.read_bytes()
    return Page(body, TYPES.get(path.suffix, PLAIN), f'"{hashlib.sha256(body).hexdigest()[:20]}"')


def _has(request: Request, etag: str) -> bool:
    given = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
    return etag in given or "*" in given
