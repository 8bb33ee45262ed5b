"""The table of losses, and the choice of the halves that lose least for each page."""

from __future__ import annotations

from itertools import product

import pytest

from bus.messages import PARTS
from bus.precisions import ASSUMED_LOSSES, Precision
from worker.morph.losses import Losses, choose_relief, choose_return, losses_of, whole_losses
from worker.morph.plan import Half

PAGES = {"full": 32, "int8": 8, "int4": 4, "int3": 3}
BELOW: tuple[Precision, ...] = ("int8", "int4", "int3")
ORDER = [2, 0, 1]
HALVES = [Half(layer, part) for layer in range(3) for part in PARTS]


def pages(half: Half, precision: Precision) -> int:
    return PAGES[precision] * (3 if half.part == "ffn" else 1)


def table() -> Losses:
    """Layer 1 is sensitive; FFNs lose twice what attention loses, for three times the pages."""
    measured = {
        precision: {
            "attention": [loss, 10 * loss, loss],
            "ffn": [2 * loss, 20 * loss, 2 * loss],
        }
        for precision, loss in {"int8": 0.0001, "int4": 0.002, "int3": 0.01}.items()
    }
    return losses_of(3, ("full", *BELOW), measured)  # type: ignore[arg-type]


def full() -> dict[Half, Precision]:
    return dict.fromkeys(HALVES, "full")


def down(
    wanted: float, budget: float, halves: dict[Half, Precision] | None = None, **more: object
) -> dict[Half, Precision]:
    arguments: dict[str, object] = {
        "allowed": BELOW,
        "order": ORDER,
        "wanted_pages": wanted,
        "budget": budget,
    }
    choice = choose_relief(halves or full(), table(), pages, **(arguments | more))  # type: ignore[arg-type]
    return choice.halves


def test_without_a_profile_every_half_has_its_share_of_what_is_assumed() -> None:
    losses = losses_of(4, ("full", "int8", "int4"), {})
    assert losses.assumed == ("int8", "int4")
    everything: dict[Half, Precision] = dict.fromkeys(
        (Half(layer, part) for layer in range(4) for part in PARTS), "int4"
    )
    assert losses.total(everything) == pytest.approx(ASSUMED_LOSSES["int4"])


def test_a_whole_model_loses_what_its_halves_do_where_that_was_measured() -> None:
    measured = {"int4": {part: [0.01, 0.02] for part in PARTS}}
    assert whole_losses(2, measured) == {"int4": pytest.approx(0.06)}  # type: ignore[arg-type]
    assert whole_losses(2, {}) == {}


def test_noise_never_makes_fewer_bits_look_better() -> None:
    losses = losses_of(
        1, BELOW, {"int8": {"attention": [0.2], "ffn": [0.1]}, "int4": {"attention": [0.1], "ffn": [0.3]}}
    )
    assert losses.of(Half(0, "attention"), "int4") == 0.2
    assert losses.of(Half(0, "ffn"), "int4") == 0.3


def test_loss_counts_from_the_shape_at_rest() -> None:
    losses = table()
    shape = full() | {Half(0, "ffn"): "int4", Half(1, "ffn"): "int8"}
    assert losses.total(shape) == pytest.approx(0.004 + 0.002)
    assert losses.total(shape, resting="int8") == pytest.approx(0.004 - 0.0002)


def test_what_loses_least_for_its_pages_goes_first_and_eight_bits_before_four() -> None:
    first = down(1, 1.0)
    assert first == {Half(2, "ffn"): "int8"}  # as layer 0, and first in the order
    some = down(150, 1.0)
    assert some == {Half(2, "ffn"): "int8", Half(0, "ffn"): "int8", Half(2, "attention"): "int8"}
    everything = down(1e9, 1.0)
    assert set(everything.values()) == {"int3"} and set(everything) == set(HALVES)


def test_the_budget_is_kept_and_smaller_steps_follow_one_that_is_too_dear() -> None:
    chosen = down(1e9, 0.0011)
    assert table().total(full() | chosen) <= 0.0011
    assert Half(1, "attention") in chosen or Half(1, "ffn") not in chosen
    assert down(1e9, 0.0) == {} and down(0, 1.0) == {}


def test_a_limit_of_layers_is_kept() -> None:
    def one_layer(halves: object, half: Half) -> bool:
        return half.layer == 2

    assert {half.layer for half in down(1e9, 1.0, may_touch=one_layer)} == {2}


def test_the_choice_is_close_to_the_best_there_is() -> None:
    """Against every shape of three halves: greedy by loss for each page is near the least."""
    losses = table()
    halves = [Half(0, "ffn"), Half(1, "ffn"), Half(0, "attention")]
    names: tuple[Precision, ...] = ("full", *BELOW)
    for wanted in range(10, 200, 10):
        chosen = choose_relief(
            dict.fromkeys(halves, "full"),
            losses,
            pages,
            allowed=BELOW,
            order=ORDER,
            wanted_pages=wanted,
            budget=1.0,
        )
        best = min(
            losses.total(dict(zip(halves, shape, strict=True)))
            for shape in product(names, repeat=3)
            if sum(pages(half, "full") - pages(half, one) for half, one in zip(halves, shape, strict=True))
            >= wanted
        )
        assert chosen.pages >= wanted
        assert chosen.loss <= best + 0.0041  # the last step may be larger than what is missing


def test_what_regains_most_for_its_pages_goes_back_first() -> None:
    shape: dict[Half, Precision] = full() | {Half(1, "ffn"): "int4", Half(0, "ffn"): "int8"}
    choice = choose_return(shape, table(), pages, goal="full", order=ORDER, spare_pages=13)
    assert choice.halves == {Half(1, "ffn"): "int8"}  # nearly all of the loss for a few of the pages
    assert choice.pages == -12 and choice.loss == pytest.approx(-(0.04 - 0.002))
    everything = choose_return(shape, table(), pages, goal="full", order=ORDER, spare_pages=1e9)
    assert everything.halves == {Half(1, "ffn"): "full", Half(0, "ffn"): "full"}
    assert choose_return(shape, table(), pages, goal="full", order=ORDER, spare_pages=11).halves == {}


def test_down_and_back_again_is_where_it_began() -> None:
    gone = full() | down(1e9, 0.01)
    back = choose_return(gone, table(), pages, goal="full", order=ORDER, spare_pages=1e9)
    assert gone | back.halves == full()


def test_a_return_takes_only_precisions_that_the_instance_has() -> None:
    losses = losses_of(3, ("full", "int4"), {})
    shape: dict[Half, Precision] = full() | {Half(0, "ffn"): "int4"}
    for goal in ("full", "int8"):  # without int8 a floor of it is met in full precision
        choice = choose_return(shape, losses, pages, goal=goal, order=ORDER, spare_pages=1e9)
        assert choice.halves == {Half(0, "ffn"): "full"}
    assert choose_return(shape, losses, pages, goal="full", order=ORDER, spare_pages=80).halves == {}
