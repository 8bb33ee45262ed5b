"""A real browser: Debian's Chromium, driven by Playwright. Without either the tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.browser.fake import Fake
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = ROOT / "docs" / "images"
WAIT_MS = 10_000

# What a browser says of an answer that is no 2xx, or of a gateway that is gone: tests cause both on purpose.
EXPECTED = ("Failed to load resource", "net::ERR_")

OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (make test-browser does)"
    )
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on PATH (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        args = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=args)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """`open_page(url, width=360, scheme="dark")`. At the end: no page had an error in its console or
    script, and none asked another origin for anything."""
    problems: list[str] = []
    pages: list[Page] = []

    def open_one(
        url: str, *, width: int = 1440, height: int = 900, scheme: Any = "light", **more: Any
    ) -> Page:
        page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
        pages.append(page)
        page.set_default_timeout(WAIT_MS)
        own = urlsplit(url).netloc
        page.on("request", lambda one: _note_foreign(one.url, own, problems))
        page.on("console", lambda one: _note_error(one.type, one.text, problems))
        page.on("pageerror", lambda error: problems.append(f"script: {error}"))
        page.goto(url)
        return page

    yield open_one
    for page in pages:
        page.close()
    assert problems == []


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as running:
        yield running


@pytest.fixture
def picture() -> Callable[..., None]:
    """`picture(page, "light")` writes docs/images/dashboard-light.png where INSTAR_SCREENSHOTS is set."""

    def take(page: Page, name: str, **options: Any) -> None:
        if os.environ.get("INSTAR_SCREENSHOTS"):
            IMAGES.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=IMAGES / f"dashboard-{name}.png", **options)

    return take


def _note_foreign(url: str, own: str, problems: list[str]) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("data", "blob") and parts.netloc != own:
        problems.append(f"asked {url}")


def _note_error(kind: str, words: str, problems: list[str]) -> None:
    if kind in ("error", "warning") and not any(expected in words for expected in EXPECTED):
        problems.append(f"console {kind}: {words}")
