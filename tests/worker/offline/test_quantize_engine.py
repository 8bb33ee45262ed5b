"""The offline tools compute what workers serve: the demo model, its sets, the engine's own model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.common.results import DEMO
from bench.quality.measure import CONTEXT, OUTPUT, counts_of, mixtures
from bench.quality.perplexity import CorpusText, Evaluator, difference
from bench.quality.setup import QualityModel, held_out, open_demo
from bus.messages import PARTS
from tests.support import model_folders
from tests.support.variant_models import Morphing
from worker.shape.layer_order import load_order

TOKENS = 180
SWAPPED = (1, 3, 6)
LOW = "int3 awq"


@pytest.fixture(scope="module")
def demo() -> QualityModel:
    return open_demo(DEMO, "int3", "awq", LOW)


@pytest.fixture
def morphing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Morphing]:
    pool = model_folders.make_pool
    monkeypatch.setattr(model_folders, "make_pool", lambda: pool(96, 65536))
    made = Morphing(DEMO, tmp_path)
    yield made
    made.close()


def swap(morphing: Morphing, precision: str) -> None:
    for layer in SWAPPED:
        for part in PARTS:
            morphing.swap(layer, part, "int3" if precision == LOW else "full")


def shape(precision: str) -> tuple[str, ...]:
    return tuple(precision if layer in SWAPPED else "full" for layer in range(8))


@pytest.mark.slow
def test_swapped_layers_lose_in_the_engine_what_they_lose_in_the_benchmark(
    demo: QualityModel, morphing: Morphing
) -> None:
    text = CorpusText(held_out(TOKENS, 1))
    window = text.windows[0]
    losses = Evaluator(demo.whole, demo.layers).losses(text, [shape("full"), shape(LOW)])
    for sequence, precision in enumerate(("full", LOW)):
        swap(morphing, precision)
        logits = morphing.runner.step({sequence: window[:-1].tolist()})
        served = float(F.cross_entropy(logits, window[1:]))
        assert served == pytest.approx(losses[shape(precision)][0], abs=1e-4)
    assert losses[shape("full")] != losses[shape(LOW)]


def test_precision_that_changes_on_the_way_is_the_engines_too(demo: QualityModel, morphing: Morphing) -> None:
    """Keys and values stay as they were made; only new tokens see the new weights."""
    text = CorpusText(held_out(TOKENS, 1))
    window = text.windows[0]
    pieces = [(0, "full"), (70, LOW), (71, "full"), (120, LOW)]
    (mixed,) = Evaluator(demo.whole, demo.layers).mixed_losses(text, [(at, shape(p)) for at, p in pieces])
    stops = [at for at, _ in pieces[1:]] + [TOKENS]
    made = []
    for (start, precision), stop in zip(pieces, stops, strict=True):
        swap(morphing, precision)
        made.append(morphing.runner.step({0: window[start:stop].tolist()}))
    served = float(F.cross_entropy(torch.cat(made), window[1:]))
    assert served == pytest.approx(mixed, abs=1e-4)


def test_shapes_that_share_layers_are_scored_as_if_alone(demo: QualityModel) -> None:
    text = CorpusText(held_out(64, 2), scored_from=10)
    evaluator = Evaluator(demo.whole, demo.layers)
    shapes = [tuple(LOW if layer < count else "full" for layer in range(8)) for count in (0, 1, 5, 8)]
    together = evaluator.losses(text, shapes)
    for one in shapes:
        assert evaluator.losses(text, [one])[one] == pytest.approx(together[one], abs=1e-6)
        assert evaluator.mixed_losses(text, [(0, one)]) == pytest.approx(together[one], abs=1e-5)


def test_the_rows_of_the_mixture_cover_the_output_and_end_where_they_should() -> None:
    rows = mixtures(("low",), ("full",))
    assert len(rows) == 8
    for pieces in rows.values():
        starts = [at for at, _ in pieces]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        assert all(CONTEXT < at < CONTEXT + OUTPUT for at in starts[1:])
    assert counts_of(8) == [0, 1, 2, 4, 8]
    assert counts_of(12) == [0, 1, 2, 4, 8, 12]


def test_a_difference_is_paired_by_window() -> None:
    mean, error = difference([3.0, 1.0, 2.0], [2.9, 0.9, 1.9])
    assert mean == pytest.approx(0.1)
    assert error == pytest.approx(0.0, abs=1e-9)


def test_the_demo_model_has_a_profile_that_workers_follow() -> None:
    order, name = load_order(DEMO)
    assert name == "profile"
    assert sorted(order) == list(range(8))


def test_the_demo_models_folder_stays_small() -> None:
    sizes = {path: path.stat().st_size for path in DEMO.rglob("*") if path.is_file()}
    assert sum(size for path, size in sizes.items() if path.parent.name == "instar") < 6_000_000
    assert sum(sizes.values()) < 24_000_000
