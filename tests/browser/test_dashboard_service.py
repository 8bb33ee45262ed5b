"""The dashboard of the real service: two workers, the demo model, nothing played."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from bench.common.service import Service, wait_for
from tests.browser.conftest import OpenPage
from tests.support.paths import DEMO_MODEL

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
]

PROMPTS = (
    "def read_lines(path):\n    ",
    "class Queue:\n    def __init__(self",
    "import os\n\n",
    "def add(a, b):\n",
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    # Little memory, so that weights are a good part of it; mode manual, so that only this test morphs.
    settings = {"WORKER__MEMORY_MB": "64", "WORKER__LAYERS_PER_STEP": "1", "MONITOR__INTERVAL_S": "0.25"}
    with Service(num_workers=2, settings=settings) as running:
        running.set_policy(mode="manual")
        yield running


def wait_for_text(page: Page, where: str, words: str, within_ms: float = 30_000) -> None:
    page.locator(where).filter(has_text=re.compile(words)).first.wait_for(state="visible", timeout=within_ms)


def order(service: Service, path: str, body: dict[str, object]) -> dict[str, object]:
    answer = httpx.post(f"{service.url()}/admin/{path}?wait=true", json=body, timeout=40)
    assert answer.is_success, answer.text
    return dict(answer.json())


def test_it_opens_and_shows_the_workers(service: Service, open_page: OpenPage) -> None:
    page = open_page(service.url())
    wait_for_text(page, "#connection", "live")
    wait_for_text(page, ".device", "w0")
    wait_for_text(page, ".device", "w1")
    assert page.locator(".device >> nth=0 >> .layer").count() == 8


def test_it_streams_an_answer(service: Service, open_page: OpenPage) -> None:
    page = open_page(service.url())
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_text(page, ".ask-numbers", "ended: length")
    wait_for_text(page, ".ask-numbers", "128 tokens")
    wait_for_text(page, ".shapes", "tp1-full: 128 tokens")


def test_a_morph_by_hand_is_seen_in_the_picture(service: Service, open_page: OpenPage) -> None:
    page = open_page(service.url())
    page.get_by_role("tab", name="By hand").click()
    page.get_by_label("Layers", exact=True).fill("2, 5")
    page.get_by_role("button", name="Swap", exact=True).click()
    wait_for_text(page, ".outcomes .chip", "applied")
    page.wait_for_selector(".layer[aria-label='Layer 5: attention int4, FFN int4']")
    wait_for_text(page, ".decisions", "swap demo@w0")
    order(service, "instances/demo@w0/swap", {"layers": [2, 5], "precision": "full"})
    page.wait_for_selector(".device >> nth=0 >> .layer[aria-label='Layer 5: attention full, FFN full']")


def test_two_workers_become_one_bracket_and_part_again(service: Service, open_page: OpenPage) -> None:
    page = open_page(service.url())
    page.get_by_role("tab", name="By hand").click()
    page.get_by_label("Degree", exact=True).select_option("2")
    page.get_by_role("button", name="Transform", exact=True).click()
    wait_for_text(page, ".outcomes .chip", "applied")
    wait_for_text(page, ".instance .degree", "tp2")
    assert page.locator(".instance.is-group .device").count() == 2
    page.get_by_label("Degree", exact=True).select_option("1")
    page.get_by_role("button", name="Transform", exact=True).click()
    wait_for_text(page, ".outcomes .chip >> nth=0", "applied")
    page.wait_for_selector(".instance:not(.is-group) >> nth=1")


def test_a_burst_is_played_against_the_service_itself(service: Service, open_page: OpenPage) -> None:
    page = open_page(service.url())
    page.get_by_role("tab", name="Burst").click()
    page.get_by_label("Length").fill("2")
    page.get_by_label("Rate", exact=True).fill("200")  # instead of a measurement
    page.get_by_role("button", name="Play the burst").click()
    wait_for_text(page, "#panel-burst", "All 8 requests are sent|The burst has ended")
    wait_for_text(page, "#panel-burst", "The burst has ended: 8 requests, for 200 tokens/s; 0 lost", 60_000)
    wait_for_text(page, "#panel-burst", "exact: of all 8 first tokens")
    wait_for_text(page, ".decisions", "burst ended demo")


def test_the_policy_is_edited_and_a_value_out_of_range_is_told(service: Service, open_page: OpenPage) -> None:
    before = policy(service)
    page = open_page(service.url())
    page.get_by_role("tab", name="Policy").click()
    high = page.get_by_label("KV use above")
    high.fill("1.5")
    page.get_by_role("button", name="Save 1 change").click()
    wait_for_text(page, ".error", "kv_usage_high is 1.5; .* 1")
    high.fill("0.9")
    page.get_by_label("Cool-down").fill("7")
    page.get_by_role("button", name="Save 2 changes").click()
    wait_for_text(page, ".notice", f"Saved as revision {before['revision'] + 1}")
    after = policy(service)
    assert after == before | {"kv_usage_high": 0.9, "cooldown_s": 7.0, "revision": before["revision"] + 1}
    wait_for_text(page, ".decisions", "kv_usage_high")  # it stands among the decisions, for everybody


def policy(service: Service) -> dict[str, Any]:
    return dict(service.get("/admin/policy").json())


def test_it_survives_a_restart_of_the_gateway(service: Service, open_page: OpenPage) -> None:
    page = open_page(service.url())
    wait_for_text(page, "#connection", "^live$")
    service.processes["gateway0"].kill()
    wait_for_text(page, "#connection", "gone since")
    service.processes["gateway0"].start()
    wait_for_text(page, "#connection", "^live$")
    wait_for_text(page, ".device", "w1")


def test_a_worker_that_is_drained_by_hand_leaves_the_picture(service: Service, open_page: OpenPage) -> None:
    """The last that needs two workers: it does not come back."""
    page = open_page(service.url())
    page.get_by_role("tab", name="By hand").click()
    page.get_by_label("Worker", exact=True).select_option("w1")
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("button", name="Yes, drain w1").click()
    wait_for_text(page, ".outcomes", "w1 finishes what it runs")
    page.locator(".device").filter(has_text="w1").wait_for(state="detached", timeout=30_000)
    wait_for_text(page, ".device", "w0")
    assert service.serving_workers() == {"w0"}
    wait_for("the process to end", lambda: not service.processes["w1"].is_alive)


def test_it_asks_for_the_key_that_is_set(open_page: OpenPage) -> None:
    with Service(num_workers=0, settings={"GATEWAY__ADMIN_KEYS": '["let-me-in"]'}) as service:
        wait_for("the gateway", lambda: _answers(service))
        page = open_page(service.url())
        page.wait_for_selector("#key-dialog[open]")
        assert not page.locator("#main").is_visible()
        page.get_by_label("Key", exact=True).fill("let-me-in")
        page.keyboard.press("Enter")
        wait_for_text(page, "#connection", "live")


def _answers(service: Service) -> bool:
    try:
        return service.get("/health").is_success
    except httpx.HTTPError:
        return False
