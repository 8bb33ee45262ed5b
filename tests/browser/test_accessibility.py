"""Every panel by axe-core, in the light and in the dark theme: nothing serious is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.fake import Fake
from tests.browser.picture import burst, deployment, weighed

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SERIOUS = ("serious", "critical")


def serious(page: Page) -> list[dict[str, Any]]:
    """Return what axe-core finds that is serious: the rule, the elements and why."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make test-browser installs it")
    violations = axe.Axe().run(page).response["violations"]
    return [
        {
            "rule": one["id"],
            "help": one["help"],
            "nodes": [(node["html"][:200], node["failureSummary"]) for node in one["nodes"][:3]],
        }
        for one in violations
        if one["impact"] in SERIOUS
    ]


@pytest.mark.parametrize("width", [1440, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_panel(
    fake: Fake, open_page: OpenPage, scheme: str, width: int
) -> None:
    fake.instances[1].layers[2] = "int4"
    fake.models = [{"name": "chat", "state": "profiled"}]
    fake.deployments = [deployment("d1", "chat", "serving", {})]
    fake.burst = burst(sent=12)
    fake.events[0]["weighed"] = weighed()
    page = open_page(fake.url, scheme=scheme, width=width)
    page.wait_for_selector(".device >> nth=3", state="visible")
    found = {}
    for panel in ("ask", "orders", "policy", "burst"):
        page.click(f"#tab-{panel}")
        page.wait_for_selector(f"#panel-{panel}", state="visible")
        found[panel] = serious(page)
    page.click(".row-button >> nth=0")
    found["a decision"] = serious(page)
    page.locator(".row-button", has_text="swap demo@w1").focus()
    page.wait_for_selector("#saw .weighed", state="visible")
    found["what was weighed"] = serious(page)
    page.click("#tab-ask")
    page.get_by_label("As", exact=True).select_option("chat")
    page.click(".offer summary")
    page.get_by_role("button", name="Example").click()
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator(".calls").get_by_text("get_weather").wait_for()
    found["tools"] = serious(page)
    assert {where: what for where, what in found.items() if what} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_where_a_key_is_asked_for(open_page: OpenPage, scheme: str) -> None:
    with Fake(key="a-key-of-admins") as fake:
        page = open_page(fake.url, scheme=scheme)
        page.wait_for_selector("#key-dialog", state="visible")
        assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_while_the_gateway_is_gone(
    fake: Fake, open_page: OpenPage, scheme: str
) -> None:
    page = open_page(fake.url, scheme=scheme)
    page.wait_for_selector(".row-button", state="visible")
    fake.stop()
    page.wait_for_selector("body[data-link=gone]")
    assert serious(page) == []
