"""The README's pictures, from a real run: bursts on two workers, what the controller made of them, and a
transform under way. Runs where INSTAR_SCREENSHOTS is set, and writes docs/images."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from bench.common.service import Service
from tests.browser.conftest import OpenPage
from tests.support.paths import DEMO_MODEL

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif("INSTAR_SCREENSHOTS" not in os.environ, reason="INSTAR_SCREENSHOTS is not set"),
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
]

BURSTS, BURST_S, PAUSE_S = 5, 22.0, 12.0
SPAN = "300"  # seconds of the time lines
PROMPTS = (
    "def read_lines(path):\n    ",
    "class Queue:\n    def __init__(self",
    "import os\n\n",
    "def add(a, b):\n",
)

# A transform of so small a model takes half a second: the page is held still where it is half-way.
HOLD = """() => {
    const watch = new MutationObserver(() => {
        const told = document.querySelector(".becoming .morph")?.textContent ?? "";
        if (!/[3-6] of 8 layers/.test(told)) return;
        watch.disconnect();
        window.requestAnimationFrame = () => 0;
        document.documentElement.dataset.held = "yes";
    });
    const all = { subtree: true, childList: true, characterData: true };
    watch.observe(document.getElementById("instances"), all);
}"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    # So little memory that a burst fills the KV cache.
    settings = {"WORKER__MEMORY_MB": "48", "WORKER__LAYERS_PER_STEP": "1", "MONITOR__INTERVAL_S": "0.5"}
    with Service(num_workers=2, settings=settings) as running:
        yield running


def test_pictures_of_bursts(service: Service, open_page: OpenPage, picture: Callable[..., None]) -> None:
    page = open_page(service.url(), height=1240)
    page.locator("#span").select_option(SPAN)
    phone = open_page(service.url(), width=390, height=1400)
    for index in range(BURSTS):
        burst = Load(service, 10 + 4 * index)
        time.sleep(BURST_S * 0.6)
        if index == BURSTS - 1:
            take_both(page, picture)
            picture(phone, "phone")
        burst.join()
        time.sleep(PAUSE_S if index < BURSTS - 1 else 0)


def test_a_picture_of_a_transform(
    service: Service, open_page: OpenPage, picture: Callable[..., None]
) -> None:
    everything_back(service)
    page = open_page(service.url())
    page.locator(".device >> nth=1").wait_for(timeout=30_000)
    load = Load(service, 6)
    order = {"workers": ["w0", "w1"], "tp": 2, "wait_s": 20}
    page.evaluate(HOLD)
    httpx.post(f"{service.url()}/admin/instances/transform", json=order, timeout=20).raise_for_status()
    page.locator("html[data-held]").wait_for(timeout=60_000)
    page.wait_for_timeout(600)  # of the boundary's transition
    picture(page, "transform", clip={"x": 0, "y": 0, "width": 1440, "height": 620})
    load.join()
    page.reload()
    page.locator(".instance.is-group .degree", has_text="tp2").wait_for(timeout=60_000)


def take_both(page: Page, picture: Callable[..., None]) -> None:
    """Take pictures with an answer whose tokens are tinted, and a decision in full."""
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator(".ask-numbers").filter(has_text="ended").wait_for(timeout=60_000)
    picture(page, "light")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(600)
    picture(page, "dark")


def everything_back(service: Service) -> None:
    """All layers full, and nothing by itself: a group's members must be alike."""
    service.set_policy(mode="manual")
    for worker in ("w0", "w1"):
        body: dict[str, Any] = {"layers": list(range(8)), "precision": "full", "wait_s": 20}
        service.apply(f"demo@{worker}/swap", body, tries=60)


class Load:
    """So many clients that ask one after the other, for a while."""

    def __init__(self, service: Service, clients: int) -> None:
        self._url, self._until = f"{service.url()}/v1/completions", time.monotonic() + BURST_S
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)

    def _ask(self, index: int) -> None:
        prompt = PROMPTS[index % len(PROMPTS)] * (4 + index)
        body = {"model": "demo", "prompt": prompt, "max_tokens": 160 + 20 * index, "ignore_eos": True}
        with contextlib.suppress(httpx.HTTPError):  # a picture needs no more load than there is
            while time.monotonic() < self._until:
                httpx.post(self._url, json=body, timeout=60)
