"""The dashboard in a real browser, against a gateway that plays a part: what is rare is shown on demand."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from bus.precisions import PRECISIONS
from tests.browser.conftest import OpenPage
from tests.browser.fake import Fake
from tests.browser.picture import PAGES, Instance, burst, deployment, weighed

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PHONE = 360


def shown(page: Page, what: str) -> None:
    page.wait_for_selector(what, state="visible")


def wait_for_text(page: Page, where: str, words: str) -> None:
    page.locator(where).filter(has_text=re.compile(words)).first.wait_for(state="visible")


# ------------------------------------------------------------------------------------- what is shown


def test_it_shows_every_device_with_its_layers_and_pages(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    shown(page, ".device >> nth=3")
    assert page.locator(".device").count() == 4
    assert page.locator(".device >> nth=0 >> .layer").count() == 16
    told = page.locator("canvas.pages >> nth=0").get_attribute("aria-label")
    assert told is not None
    assert told.startswith("Memory of w0, 100 MiB in pages of 64 KiB: weights ")


def test_a_layer_that_is_swapped_changes_its_colour_and_its_height(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    half = page.locator(".device >> nth=1 >> .layer >> nth=2 >> .half.ffn")
    assert half.get_attribute("data-kind") == "full"
    before = half.locator("i").bounding_box()
    fake.instances[1].layers[2] = "int4"
    fake.tell_state()
    shown(page, ".device >> nth=1 >> .layer[aria-label='Layer 2: attention int4, FFN int4']")
    page.wait_for_timeout(700)  # of its transition
    after = half.locator("i").bounding_box()
    assert before is not None
    assert after is not None
    assert after["height"] < before["height"] / 2


def test_what_only_the_gateway_knows_of_is_drawn(
    fake: Fake, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A precision, a field of the policy and a kind of morph that the dashboard never heard of."""
    monkeypatch.setitem(PAGES, "int6", 26)
    swap, *_ = fake.tables["morphs"]
    fake.tables["precisions"].insert(
        2, {"name": "int6", "label": "six bits", "bits": 6, "colour": "#123456", "dark_colour": "#abcdef"}
    )
    fake.tables["policy"].append(
        {"name": "calm_s", "label": "Calm", "group": "When", "unit": "s", "type": "number", "choices": {}}
    )
    fake.policy["calm_s"] = 7
    blocks = {"name": "pages", "label": "Pages", "summary": "to lend", "type": "integer", "is_shown": True}
    fake.tables["morphs"].append(
        swap | {"name": "lend", "label": "Lend", "summary": "lend pages", "fields": [blocks]}
    )
    fake.instances[1].layers[2] = "int6"
    page = open_page(fake.url)
    half = page.locator(".device >> nth=1 >> .layer >> nth=2 >> .half.ffn")
    assert half.get_attribute("data-kind") == "int6"
    kind = half.evaluate("one => getComputedStyle(one).getPropertyValue('--kind')")
    assert kind.strip() == "#123456"
    wait_for_text(page, "#legend", "six bits")
    page.get_by_role("tab", name="Policy").click()
    assert page.get_by_label("Calm").input_value() == "7"
    page.get_by_role("tab", name="By hand").click()
    page.get_by_label("Pages", exact=True).fill("3")
    page.get_by_role("button", name="Lend", exact=True).click()
    wait_for_text(page, ".outcomes .chip", "running")
    assert fake.orders == [("instances/demo@w0/lend", {"pages": 3, "wait_s": 5})]


def test_the_workers_of_a_pipeline_each_have_their_own_layers(fake: Fake, open_page: OpenPage) -> None:
    stages = [
        {"workers": ["w0", "w1"], "first": 0, "end": 6},
        {"workers": ["w2", "w3"], "first": 6, "end": 16},
    ]
    fake.instances = [Instance(["w0", "w1", "w2", "w3"], stages=stages)]
    page = open_page(fake.url)
    wait_for_text(page, ".instance .degree", "^tp2 pp2$")
    told = [page.locator(f".device >> nth={i} >> .stage").inner_text() for i in range(4)]
    assert told == [
        "stage 1: layers 0 to 5, shard 1 of 2",
        "stage 1: layers 0 to 5, shard 2 of 2",
        "stage 2: layers 6 to 15, shard 1 of 2",
        "stage 2: layers 6 to 15, shard 2 of 2",
    ]
    assert [page.locator(f".device >> nth={i} >> .layer").count() for i in range(4)] == [6, 6, 10, 10]
    later = page.locator(".device >> nth=3 >> .layer >> nth=0")
    assert str(later.get_attribute("aria-label")).startswith("Layer 6: attention full, FFN full, degree 2")
    later.click()
    assert page.get_by_label("Layers", exact=True).input_value() == "6"
    assert page.locator(".device >> nth=1 >> .layer[aria-selected='true']").count() == 0


def test_the_boundary_of_a_transform_travels_and_both_instances_stand_in_one_frame(
    fake: Fake, open_page: OpenPage
) -> None:
    page = open_page(fake.url)
    shown(page, ".device")
    places = []
    for done in (2, 8, 14):
        fake.transform_to(done)
        wait_for_text(page, ".becoming .morph", f"{done} of 16 layers")
        page.wait_for_timeout(600)  # of its transition
        box = page.locator(".becoming .boundary >> nth=0").bounding_box()
        assert box is not None
        places.append(box["x"])
    assert places == sorted(places, reverse=True)  # the last layer goes first
    assert page.locator(".becoming .instance").count() == 2
    assert "degree 2" in str(page.locator(".device >> nth=1 >> .layer >> nth=15").get_attribute("aria-label"))


def test_a_worker_that_does_not_report_has_no_numbers_instead_of_zeros(
    fake: Fake, open_page: OpenPage
) -> None:
    fake.silent.add("w3")
    page = open_page(fake.url)
    silent = page.locator(".device", has=page.locator("h4", has_text="w3"))
    wait_for_text(page, ".device .tag", "no report")
    assert "busy –" in silent.inner_text()
    assert not silent.locator("canvas").is_visible()


def test_a_gpu_is_told_in_words_and_a_device_without_one_says_nothing(
    fake: Fake, open_page: OpenPage
) -> None:
    page = open_page(fake.url)
    wait_for_text(page, ".gpu", "NVIDIA H100 · busy 87 % · 71 GiB of 80 GiB · 612 W of 700 W · 64 °C")
    (told,) = [text for text in page.locator(".gpu").all_inner_texts() if text]
    assert told.endswith("1980 MHz · slowed by power cap 25 %")


def test_a_request_that_waits_is_counted_once_in_the_header(fake: Fake, open_page: OpenPage) -> None:
    """The gateway's own count has those that wait at workers, too."""
    fake.queued, fake.unplaced = 11, 3
    page = open_page(fake.url)
    waiting = page.locator("#vitals div", has_text="waiting").locator("dd")
    assert waiting.inner_text() == str(4 * 2 + 3)


def test_a_decision_tells_what_it_saw_and_what_it_came_to(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.locator(".row-button", has_text="swap demo@w1").focus()
    wait_for_text(page, "#saw", "What it saw")
    told = page.locator("#saw").inner_text()
    assert "KV use 0.91 above 0.85" in told
    assert re.search(r"KV usage\s+91 %", told)
    assert re.search(r"bytes copied\s+4 MiB", told)
    page.locator(".mark[data-glyph=resize]").hover()
    wait_for_text(page, "#peek", "12 pages are free, 40 are needed")


def test_what_the_planner_weighed_is_a_table_with_what_was_taken_and_why_not_the_rest(
    fake: Fake, open_page: OpenPage
) -> None:
    page = open_page(fake.url)
    shown(page, ".row-button")
    event = {"kind": "levers_weighed", "source": "controller", "subject": "demo@w0", "reason": "4 wait"}
    numbers = {"queue_cost_s": 14400.0, "move_cost_s": 0.8, "windows": 3}
    fake.tell_event(event | {"at": time.time(), "numbers": numbers, "morph_id": "", "weighed": weighed()})
    wait_for_text(page, "#saw", "4 requests wait for 90 KV blocks")
    rows = [" ".join(row.split()) for row in page.locator("#saw .weighed tbody tr").all_inner_texts()]
    assert rows == [
        "queue demo@w0 – 0 never",
        "swap demo@w0: 3 layers to int4 120 KV blocks, after 300 ms 6.5, loss 0.12 % 8",
        "move demo@w0 to demo@w1 taken 90 KV blocks, after 100 ms 0.4 0.8",
        "merge not possible: groups are made for long requests only",
    ]
    told = page.locator("#saw").inner_text()
    assert "Taken in all: 0.8, the longest wait 100 ms, within the objective" in told
    assert "windows" in told and "move cost" not in told  # which the table has
    widths = page.locator("#saw .weighed .bar i").evaluate_all("all => all.map((one) => one.offsetWidth)")
    assert widths[0] > 5 * widths[1] > 0


def test_numbers_of_a_decision_stand_side_by_side(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    shown(page, ".row-button")
    numbers = {"kv_blocks": 100, "kv_needed": 150, "blocks_after": 160, "loss": 0.0012, "loss_budget": 0.0025}
    fake.decide("m-new", "demo@w0", "150 KV blocks are needed", numbers | {"halves": 4})
    wait_for_text(page, "#saw", "Growth of the perplexity")
    rows = [" ".join(row.split()) for row in page.locator("#saw .bars div").all_inner_texts()]
    assert rows == [
        "KV needed 150",
        "KV blocks now 100",
        "KV blocks afterwards 160",
        "by the profile 0.12 %",
        "at most 0.25 %",
    ]
    assert "loss" not in page.locator("#saw .numbers").first.inner_text()


def test_it_says_what_the_percentiles_are_of(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    wait_for_text(page, "#percentiles", "first tokens of the last 10 s, from when a worker got the request")
    wait_for_text(page, "#percentiles", "at most 1 % off")


def test_an_event_does_not_name_its_subject_twice(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    shown(page, ".row-button")
    event = {"kind": "policy_changed", "source": "gateway", "subject": "policy", "reason": "windows 3 -> 5"}
    fake.tell_event(event | {"at": time.time(), "numbers": {}, "morph_id": ""})
    row = page.locator(".row-button", has_text="windows 3 -> 5")
    assert row.locator("b").inner_text() == "policy changed"


def test_why_nothing_was_morphed_is_in_the_list_with_its_numbers(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    shown(page, ".row-button")
    reason = "requests wait for compute, not for KV blocks: 1200 prompt tokens are due at 1000 a second"
    event = {
        "kind": "relief_withheld",
        "source": "w0",
        "subject": "demo@w0",
        "reason": reason,
        "morph_id": "",
    }
    fake.tell_event(event | {"at": time.time(), "numbers": {"kv_needed": 10, "kv_blocks": 100}})
    row = page.locator(".row-button", has_text=reason)
    assert row.locator("b").inner_text() == "relief withheld demo@w0"
    row.focus()
    wait_for_text(page, "#saw", "KV needed")


def test_a_decision_that_is_pointed_at_is_chosen_by_a_click(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    row = page.locator(".row-button >> nth=1")
    row.hover()
    row.click()
    assert row.get_attribute("aria-current") == "true"
    assert page.locator(".row-button[tabindex='0']").count() == 1


# ------------------------------------------------------------------------------------- what is done


def test_a_swap_by_hand_is_followed_to_its_end(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.get_by_role("tab", name="By hand").click()
    page.get_by_label("Layers", exact=True).fill("next 2")
    page.get_by_role("button", name="Swap", exact=True).click()
    wait_for_text(page, ".outcomes .chip", "running")
    wait_for_text(page, ".outcomes .chip", "applied")
    wait_for_text(page, ".outcomes", "98 pages freed")
    assert fake.orders == [("instances/demo@w0/swap", {"precision": "int4", "wait_s": 5, "count": 2})]


def test_layers_that_are_pointed_at_are_those_of_the_order(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.locator(".device >> nth=2 >> .layer >> nth=3").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    assert page.get_by_label("Layers", exact=True).input_value() == "3, 4"
    assert page.locator("#panel-orders select >> nth=0").input_value() == "demo@w2"


def test_a_refusal_stands_at_the_field_that_it_is_about(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.get_by_role("tab", name="By hand").click()
    layers = page.get_by_label("Layers", exact=True)
    layers.fill("99")
    page.get_by_role("button", name="Swap", exact=True).click()
    wait_for_text(page, ".error", "layers names 99; demo@w0 has layers 0 to 15")
    assert layers.get_attribute("aria-invalid") == "true"


def test_a_worker_of_two_models_is_named_once_in_a_transform(fake: Fake, open_page: OpenPage) -> None:
    fake.instances.append(Instance(["w0"]))
    page = open_page(fake.url)
    page.get_by_role("tab", name="By hand").click()
    assert page.locator(".checks input").evaluate_all("all => all.map((one) => one.value)") == [
        "w0",
        "w1",
        "w2",
        "w3",
    ]


def test_drain_asks_before_it_is_sent(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.get_by_role("tab", name="By hand").click()
    page.get_by_role("button", name="Drain", exact=True).click()
    assert fake.orders == []
    page.get_by_role("button", name="Yes, drain w0").click()
    wait_for_text(page, ".outcomes", "w0 finishes what it runs")
    assert fake.orders == [("workers/w0/drain", None)]


def test_a_warning_stands_at_the_last_worker_of_a_model(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.get_by_role("tab", name="By hand").click()
    form = page.locator("form[aria-label=Drain]")
    assert "last worker" not in form.inner_text()
    fake.instances = [Instance(["w0", "w1"])]  # of a group the other one serves on
    fake.tell_state()
    shown(page, ".instance.is-group")
    assert "last worker" not in form.inner_text()
    fake.instances = [Instance(["w0"])]
    fake.tell_state()
    wait_for_text(page, "form[aria-label=Drain]", "the last worker that serves demo")


def test_the_last_worker_is_drained_only_when_asked_again(fake: Fake, open_page: OpenPage) -> None:
    fake.last_worker = "w0"
    page = open_page(fake.url)
    page.get_by_role("tab", name="By hand").click()
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("button", name="Yes, drain w0").click()
    wait_for_text(page, ".error", "w0 is the last worker that serves demo")
    assert fake.orders == [("workers/w0/drain", None)]
    page.get_by_role("button", name="Drain w0 all the same").click()
    wait_for_text(page, ".outcomes", "w0 finishes what it runs")
    assert fake.orders == [("workers/w0/drain", None)] * 2 and fake.forced == ["w0"]


def test_deployments_show_what_is_expected_of_them_beside_what_they_give(
    fake: Fake, open_page: OpenPage
) -> None:
    fake.deployments = [
        deployment("d1", "chat", "serving", {"max_latency_s": 1.5, "pp": 2}),
        deployment("d0", "old", "retired", {}),
    ]
    page = open_page(fake.url)
    wait_for_text(page, ".deployment .chip", "serving")
    told = page.locator(".deployment").all_inner_texts()
    assert len(told) == 1
    for words in (
        "chat d1",
        "least cost · at most 1.5 s · fixed: pp2",
        "tp1 pp2 int4 on w0 (layers 0 to 7) → w1 (layers 8 to 15)",
        "96 ms expected, 310 ms now (P95)",
        "29 MiB expected",
        "64 MiB, 8192 tokens",
    ):
        assert words in told[0], told[0]


def test_without_models_there_is_no_word_of_deployments(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    shown(page, ".device")
    assert not page.locator("#deployments").is_visible()


def test_a_model_is_deployed_and_one_is_retired_after_a_question(fake: Fake, open_page: OpenPage) -> None:
    fake.models = [{"name": "chat", "state": "profiled"}, {"name": "code", "state": "profiling"}]
    page = open_page(fake.url)
    page.get_by_text("Deploy a model").click()
    page.get_by_label("Latency at most").fill("0.001")
    page.get_by_role("button", name="Deploy", exact=True).click()
    wait_for_text(page, ".deploy .notice", "no configuration meets the intent")
    page.get_by_label("Latency at most").fill("2")
    page.get_by_role("button", name="Deploy", exact=True).click()
    wait_for_text(page, ".deployment", "needs 30408704 bytes, 4096 are free on w0")
    page.get_by_role("button", name="Retire", exact=True).click()
    assert len(fake.orders) == 2
    page.get_by_role("button", name="Yes, retire chat").click()
    wait_for_text(page, ".deployment .chip", "retiring")
    assert fake.orders[1:] == [
        ("deployments", {"model": "chat", "intent": {"max_latency_s": 2}}),
        ("deployments/d2", None),
    ]


def test_the_policy_is_edited_and_its_limits_are_told(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.get_by_role("tab", name="Policy").click()
    high = page.get_by_label("KV use above")
    high.fill("1.5")
    page.get_by_role("button", name="Save 1 change").click()
    wait_for_text(page, ".error", "kv_usage_high is 1.5; it must be above 0 and at most 1")
    high.fill("0.9")
    page.get_by_role("radio", name="manual").check()
    loss = page.get_by_label("Loss at most")
    loss.fill("0")
    page.get_by_role("button", name="Save 3 changes").click()
    wait_for_text(page, ".notice", "Saved as revision 4")
    assert (fake.policy["kv_usage_high"], fake.policy["mode"]) == (0.9, "manual")
    assert fake.policy["loss_budget"] == 0
    loss.fill("")
    page.get_by_role("button", name="Save 1 change").click()
    wait_for_text(page, ".notice", "Saved as revision 5")
    assert fake.told == {"revision": 4, "loss_budget": "mode"} and fake.policy["loss_budget"] is None


def test_text_is_tinted_by_the_shape_that_made_it(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_text(page, ".shapes", "tp1-int4x2: 6 tokens")
    spans = page.locator(".output span")
    assert [spans.nth(i).get_attribute("data-kind") for i in range(2)] == ["full", "int4"]
    assert spans.nth(1).inner_text().startswith("word6")
    wait_for_text(page, ".ask-numbers", "12 tokens .* ended: length")


def test_a_chat_offers_tools_and_shows_the_calls(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    assert not page.locator(".offer").is_visible()  # a completion has none
    page.get_by_label("As", exact=True).select_option("chat")
    page.locator(".offer summary").click()
    page.get_by_label("Tools", exact=True).fill("[{")
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_text(page, ".offer .error", "the tools are no JSON")
    page.get_by_role("button", name="Example").click()
    page.get_by_label("Calls", exact=True).select_option("required")
    page.get_by_label("Minimum precision").select_option("int8")
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_text(page, ".calls", r'get_weather\(\{"city": "Rome"\}\)')
    wait_for_text(page, ".ask-numbers", "ended: tool_calls")
    (tool,) = fake.asked["tools"]
    assert tool["function"]["name"] == "get_weather" and fake.asked["tool_choice"] == "required"
    assert fake.asked["min_precision"] == "int8"


def test_a_burst_is_played_and_followed_to_its_end(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    page.get_by_role("tab", name="Burst").click()
    page.get_by_label("Length").fill("8")
    page.get_by_role("button", name="Play the burst").click()
    wait_for_text(page, "#panel-burst", "8 of 24 requests, for 600 tokens/s, are sent; 7 answered")
    assert fake.orders == [("burst", {"model": "demo", "seconds": 8})]
    assert page.get_by_role("button", name="Play the burst").is_disabled()
    assert page.locator("#panel-burst progress").is_visible()
    told = str(page.locator(".ttft-plot").get_attribute("aria-label"))
    assert told.startswith("TTFT over time: the longest is 2.4 s, in second 3 of 8; over the objective in 1")
    assert page.locator(".ttft-bars i").count() == 8
    assert page.locator(".ttft-bars .is-late").count() == 1
    fake.burst = burst(sent=24, state="ended")
    wait_for_text(page, "#panel-burst", "The burst has ended: 24 requests, for 600 tokens/s; 0 lost")
    wait_for_text(page, "#panel-burst", "exact: of all 23 first tokens")
    assert not page.locator("#panel-burst progress").is_visible()
    assert page.get_by_role("button", name="Play the burst").is_enabled()


def test_a_burst_that_another_page_plays_is_shown_refused_by_name_and_stopped(
    fake: Fake, open_page: OpenPage
) -> None:
    page = open_page(fake.url)
    shown(page, ".row-button")
    fake.burst = burst(sent=8)
    page.get_by_role("tab", name="Burst").click()
    page.get_by_role("button", name="Play the burst").click()  # it has not heard of the other one
    wait_for_text(page, "#panel-burst .notice", "burst b1 of demo is sending: 8 of its 24 requests are sent")
    wait_for_text(page, "#panel-burst", "8 of 24 requests")
    page.get_by_role("button", name="Stop").last.click()
    wait_for_text(page, "#panel-burst", "Stopped: 8 of 24 requests were sent")
    fake.burst = burst(sent=8)
    fake.tell_event(
        {"kind": "burst_started", "source": "gateway", "subject": "demo", "reason": "", "at": time.time()}
    )
    wait_for_text(page, "#panel-burst", "8 of 24 requests, for")


# ------------------------------------------------------------------------------------- keys and losses


def test_with_a_key_it_shows_nothing_until_it_has_the_key(open_page: OpenPage) -> None:
    with Fake(key="open sesame") as fake:
        page = open_page(fake.url)
        shown(page, "#key-dialog[open]")
        assert not page.locator("#main").is_visible()
        page.keyboard.type("an open “sesame”")  # what no header can carry is not kept, and asked again
        page.keyboard.press("Enter")
        assert page.evaluate("sessionStorage.length") == 0 and page.locator("#key-dialog[open]").is_visible()
        page.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        wait_for_text(page, "#key-why", "no API key")
        page.get_by_label("Key", exact=True).fill("open sesame")
        page.get_by_role("button", name="Use it").click()
        shown(page, ".device")
        page.reload()
        shown(page, ".device")  # the tab still has it
        assert page.evaluate("localStorage.length") == 0


def test_the_key_of_requests_is_another_one(open_page: OpenPage) -> None:
    with Fake(v1_key="knock") as fake:
        page = open_page(fake.url)
        page.get_by_role("button", name="Send", exact=True).click()
        wait_for_text(page, "#key-title", "/v1")
        page.get_by_label("Key", exact=True).fill("knock")
        page.keyboard.press("Enter")
        wait_for_text(page, ".shapes", "tp1-full: 6 tokens")


def test_it_survives_a_restart_and_says_since_when_the_gateway_is_gone(
    fake: Fake, open_page: OpenPage
) -> None:
    page = open_page(fake.url)
    wait_for_text(page, "#connection", "^live$")
    fake.stop()
    wait_for_text(page, "#connection", "gone since")
    assert page.locator(".device >> nth=0").is_visible()  # as it was last, greyed
    assert "grayscale" in page.locator("#devices").evaluate("one => getComputedStyle(one).filter")
    fake.instances[0].layers[0] = "int8"
    fake.start()
    wait_for_text(page, "#connection", "^live$")
    shown(page, ".layer[aria-label^='Layer 0: attention int8']")


# ------------------------------------------------------------------------------------- for everybody


def test_a_gateway_that_takes_the_call_and_never_answers_is_given_up(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    shown(page, ".device")
    page.route("**/admin/live", lambda route: None)
    page.clock.install()
    page.reload()
    wait_for_text(page, "#connection", "connecting")
    page.clock.fast_forward(26_000)
    wait_for_text(page, "#connection", "the gateway does not answer")


def test_a_gateway_that_fails_in_its_opening_is_asked_less_and_less_often(
    fake: Fake, open_page: OpenPage
) -> None:
    page = open_page(fake.url)
    shown(page, ".device")
    asked: list[float] = []

    def hello_only(route: Route) -> None:
        asked.append(time.monotonic())
        hello = f'event: hello\ndata: {{"now": {time.time()}}}\n\n'
        route.fulfill(content_type="text/event-stream", body=hello)

    page.route("**/admin/live", hello_only)
    page.reload()
    page.wait_for_timeout(4000)  # at the first pause it would be eight times or more
    assert 2 <= len(asked) <= 6


def test_nothing_is_wider_than_a_phone(fake: Fake, open_page: OpenPage) -> None:
    fake.transform_to(5)
    fake.burst = burst(sent=24, state="ended")
    fake.events[0]["weighed"] = weighed()
    page = open_page(fake.url, width=PHONE, height=780)
    shown(page, ".device")
    page.get_by_label("As", exact=True).select_option("chat")
    page.locator(".offer summary").click()
    page.locator(".row-button", has_text="swap demo@w1").focus()
    shown(page, "#saw .weighed")
    for tab in ("Ask", "By hand", "Policy", "Burst"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE


def test_the_keyboard_reaches_everything_and_leaves_it_again(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    shown(page, ".row-button")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "name => { const e = document.activeElement; return e.id || e.className || e.tagName }", ""
            )
        )
        if seen[-1] == "BODY":
            break
    for wanted in ("skip", "theme", "layer", "of-instance", "mark", "row-button", "tab-ask", "primary"):
        assert any(wanted in one for one in seen), f"{wanted} is not among {seen}"
    assert max(seen.count(one) for one in seen if one != "layer") < 10  # one stop for each list, and no trap
    page.get_by_role("tab", name="Ask").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#panel-orders").is_visible()


def test_focus_is_seen_and_controls_have_names(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    shown(page, ".device")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [role=img], [role=option]")]
            .filter((one) => one.type !== "hidden" && !(one.labels?.length || one.getAttribute("aria-label")
                    || one.textContent.trim()))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(fake: Fake, open_page: OpenPage, scheme: str) -> None:
    page = open_page(fake.url, scheme=scheme)
    shown(page, ".device")
    pairs = [
        ("text", "surface"),
        ("muted", "surface"),
        ("muted", "ground"),
        ("bad", "surface"),
        ("good", "surface"),
    ]
    for ink, ground in [*pairs, ("warn", "surface"), ("slo", "surface"), ("press-text", "press")]:
        assert contrast(page, ink, ground) >= 4.5, f"{ink} on {ground}, {scheme}"
    for data in (*PRECISIONS, "kv-used", "s1", "s2", "mark-note"):
        assert contrast(page, data, "surface") >= 3, f"{data}, {scheme}"


def contrast(page: Page, ink: str, ground: str) -> float:
    """WCAG 2.2, relative luminance."""
    lights = []
    for name in (ink, ground):
        value = page.evaluate(
            "n => getComputedStyle(document.documentElement).getPropertyValue('--' + n)", name
        )
        parts = [int(value.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_the_theme_is_chosen_and_kept(fake: Fake, open_page: OpenPage) -> None:
    page = open_page(fake.url)
    for _ in range(2):
        page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 19, 22)"


def test_hours_of_feed_leave_no_more_behind_than_a_quarter_of_one(fake: Fake, open_page: OpenPage) -> None:
    """Moments and events of 20 minutes past are dropped; what is drawn does not grow with them."""
    page = open_page(fake.url)
    shown(page, ".row-button")
    old = time.time() - 1200
    for index in range(300):
        fake.tell_event(
            {"kind": "worker_joined", "source": "t", "subject": f"x{index}", "reason": "", "at": old + index}
        )
    sizes = page.evaluate(
        """async () => {
            const { store } = await import("/dashboard/store.js");
            await new Promise((resolve) => setTimeout(resolve, 800));
            store.forget();
            return [store.events.filter((one) => one.at < store.now() - 901).length, store.events.length];
        }"""
    )
    assert sizes[0] == 0
    assert sizes[1] <= 600


def test_pages_of_every_kind_add_up_to_the_budget(fake: Fake, open_page: OpenPage) -> None:
    """Also where another model lies on the device, and where a worker tells of no ranges."""
    page = open_page(fake.url)
    worker, instance = fake.state()["workers"][0], fake.instances[0].as_json()
    other = {
        "owner": "else@w0",
        "kind": "weights",
        "layer": 0,
        "part": "ffn",
        "precision": "full",
        "pages": 100,
    }
    with_other = worker | {
        "ranges": [*worker["ranges"], other],
        "pages": worker["pages"] | {"weights": worker["pages"]["weights"] + 100, "budget": 1700},
    }
    for told in (worker, with_other, worker | {"ranges": []}):
        by = page.evaluate(
            """async ([worker, instance]) => {
                const { segments, cells } = await import("/dashboard/shape.js");
                const list = segments(worker, instance);
                return [list.map((one) => [one.kind, one.pages]), cells(list, 90)];
            }""",
            [told, instance],
        )
        pages = {kind: sum(num for name, num in by[0] if name == kind) for kind, _ in by[0]}
        assert round(sum(pages.values())) == told["pages"]["budget"]
        assert set(by[1]) == set(pages)  # what is there is seen
        assert pages.get("other", 0) == (100 if told is with_other else 0)
