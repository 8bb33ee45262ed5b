"""The order in which layers are swapped: Algorithm 1, what it writes, and what a worker makes of it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench.common.oracles import make_oracle
from bus.precisions import Precision
from tests.support.dense_layers import build_dense, open_layerwise, read_named
from tests.support.tiny_model import byte_level
from tests.worker.model.test_oracle import LONGROPE
from worker.model import ModelError, read_config
from worker.model.quantized_sets import MATRICES
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.offline.__main__ import main
from worker.offline.calibration import read_calibration
from worker.offline.importance import LayerRanking, Metric, ScoreWeights, similarity
from worker.offline.kv_loss import measure_kv
from worker.shape.host_images import find_matrices
from worker.shape.kv_profile import KVProfile, kv_loss_or_why, kv_profile_path, write_kv_profile
from worker.shape.layer_order import half_losses, half_losses_or_why, load_order, losses, profile_path

CPU = torch.device("cpu")
LAYERS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_oracle("llama", vocab_size=400, num_hidden_layers=LAYERS).save_pretrained(folder)
    byte_level(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path


def profile(folder: Path, text: Path, *more: str) -> int:
    sizes = ["--windows", "2", "--window-tokens", "48", "--device", "cpu"]
    return main(["profile", str(folder), "--calibration", str(text), *sizes, *more])


class Parts:
    """A model in pieces, ready to be profiled."""

    def __init__(self, folder: Path, precision: Precision = "int3") -> None:
        config, checkpoint = read_config(folder), CheckpointWeights(folder)
        self.model = open_layerwise(folder)
        self.layers = [self.model.layer(i) for i in range(LAYERS)]
        matrices = find_matrices(config, checkpoint, precision, "")
        self.quantised = [self.model.quantized_layer(i, precision, matrices) for i in range(LAYERS)]
        self.windows = torch.randint(0, 400, (2, 40), generator=torch.Generator().manual_seed(0))

    def hidden(self, window: torch.Tensor, swapped: set[int]) -> list[torch.Tensor]:
        """At every layer's entry, and at the head's."""
        states = [self.model.embed(window)]
        for i in range(LAYERS):
            states.append(self.model.run(self.quantised[i] if i in swapped else self.layers[i], states[-1]))
        return states

    def output(self, window: torch.Tensor, swapped: set[int]) -> torch.Tensor:
        return self.model.logits(self.hidden(window, swapped)[-1])


def algorithm_1(parts: Parts, weights: ScoreWeights, metric: Metric) -> tuple[list[int], list[float]]:
    """Return the sequence and its LIS as the paper writes it, every output computed from the start."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    lts, lrs = [], []
    for i in range(LAYERS):
        states = [parts.hidden(window, set()) for window in parts.windows]
        lts.append(mean([similarity(s[i], s[i + 1], metric) for s in states]))
        made = [parts.model.run(parts.quantised[i], s[i]) for s in states]
        lrs.append(mean([similarity(s[i + 1], q, metric) for s, q in zip(states, made, strict=True)]))
    order, scores = list[int](), []
    while len(order) < LAYERS:
        lis = {}
        for j in set(range(LAYERS)) - set(order):
            mds = [
                similarity(parts.output(w, set(order)), parts.output(w, {*order, j}), metric)
                for w in parts.windows
            ]
            lis[j] = weights.lts * lts[j] + weights.lrs * lrs[j] + weights.mds * mean(mds)
        order.append(max(lis, key=lambda j: lis[j]))
        scores.append(lis[order[-1]])
    return order, scores


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("weights", [ScoreWeights(), ScoreWeights(0, 0, 1)], ids=["paper", "output only"])
def test_keeping_hidden_states_changes_nothing_in_algorithm_1(
    saved: Path, weights: ScoreWeights, metric: Metric
) -> None:
    parts = Parts(saved)
    expected, lis = algorithm_1(parts, weights, metric)
    profiler = LayerRanking(parts.model, parts.layers, parts.quantised, parts.windows, metric)
    trials: list[int] = []
    order, scores = profiler.sequence(weights, lambda: trials.append(1))
    assert order == expected
    assert scores.lis == pytest.approx(lis, abs=1e-5)
    assert len(trials) == profiler.num_trials


@pytest.mark.parametrize("length", [40, 100])
def test_longrope_turns_short_and_long_windows_as_transformers_does(tmp_path: Path, length: int) -> None:
    oracle = make_oracle(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64, sliding_window=None
    )
    oracle.save_pretrained(tmp_path)
    model, window = open_layerwise(tmp_path, length), torch.arange(length)
    hidden = model.embed(window)
    for index in range(model.config.num_layers):
        hidden = model.run(model.layer(index), hidden)
    with torch.no_grad():
        wanted = oracle(window[None]).logits[0].float()
    torch.testing.assert_close(model.logits(hidden), wanted, rtol=1e-4, atol=1e-4)


def test_the_layer_that_quantisation_spares_goes_first_and_the_one_it_breaks_last(saved: Path) -> None:
    parts = Parts(saved)
    broken = {
        name: 3 * tensor if name.removesuffix(".weight") in MATRICES else tensor
        for name, tensor in read_named(saved, 1).items()
    }
    quantised = list(parts.quantised)
    quantised[1], quantised[2] = build_dense(parts.model.config, 1, broken), parts.layers[2]
    ranking = LayerRanking(parts.model, parts.layers, quantised, parts.windows, "cosine")
    order, _ = ranking.sequence(ScoreWeights(0, 0, 1), lambda: None)
    assert order[0] == 2
    assert order[-1] == 1


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_nothing_is_nearer_than_the_same(metric: Metric) -> None:
    a = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    same, near, far = (similarity(a, a + noise * a.flip(-1), metric) for noise in (0.0, 0.1, 1.0))
    assert same == pytest.approx(1.0 if metric == "cosine" else 0.0, abs=1e-6)
    assert same > near > far


# --------------------------------------------------------------------------- what is written and read


def test_the_command_writes_what_the_worker_follows(folder: Path, text: Path) -> None:
    assert profile(folder, text) == 0
    found = json.loads(profile_path(folder, "int4").read_text())
    assert found["weights"] == [0.25, 0.25, 0.5]
    assert found["method"] == "rtn"
    assert found["windows"] == [2, 48]
    assert load_order(folder) == (found["sequence"], "profile")
    assert load_order(folder, "profile") == (found["sequence"], "profile")
    assert load_order(folder, "front-to-back") == ([0, 1, 2, 3], "front-to-back")


def test_perplexities_are_kept_for_every_number_of_swapped_layers(folder: Path, text: Path) -> None:
    assert profile(folder, text, "--precision", "int3") == 0
    path = profile_path(folder, "int3")
    found = json.loads(path.read_text())
    parts = Parts(folder)
    windows = read_calibration(read_config(folder), text, 2, 48).tokens
    for count, perplexity in enumerate(found["perplexity"]):
        swapped = set(found["sequence"][:count])
        outputs = [parts.output(window, swapped)[:-1] for window in windows]
        nats = [F.cross_entropy(out, window[1:]) for out, window in zip(outputs, windows, strict=True)]
        assert math.log(perplexity) == pytest.approx(float(sum(nats) / 2), abs=1e-4)
    assert len(found["perplexity"]) == LAYERS + 1


def test_a_profile_without_perplexities_gets_them_and_keeps_its_order(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(folder, text)
    path = profile_path(folder, "int4")
    found = json.loads(path.read_text())
    older = {name: value for name, value in found.items() if name != "perplexity"}
    path.write_text(json.dumps(older))
    assert losses(read_config(folder), ["int4"]) == {}
    monkeypatch.setattr(LayerRanking, "_degradation", None)  # no trial is run
    assert profile(folder, text) == 0
    again = json.loads(path.read_text())
    assert {**again, "perplexity": []} == {**found, "perplexity": []}
    assert again["perplexity"] == pytest.approx(found["perplexity"], rel=1e-3)


def test_every_half_is_measured_alone(saved: Path) -> None:
    parts = Parts(saved)
    ranking = LayerRanking(parts.model, parts.layers, parts.quantised, parts.windows, "cosine")
    trials: list[int] = []
    found = ranking.divergences(lambda: trials.append(1))
    assert len(trials) == ranking.num_divergences == 2 * LAYERS * 2
    layer, expected = 2, 0.0
    for window in parts.windows:
        states = parts.hidden(window, set())
        x = parts.model.run(
            replace(parts.layers[layer], feed_forward=parts.quantised[layer].feed_forward), states[layer]
        )
        for later in parts.layers[layer + 1 :]:
            x = parts.model.run(later, x)
        full, swapped = (F.log_softmax(parts.model.logits(h), -1) for h in (states[-1], x))
        expected += float((full.exp() * (full - swapped)).sum(-1).mean()) / len(parts.windows)
    assert found["ffn"][layer] == pytest.approx(expected, rel=1e-3)
    assert all(nats > 0 for of_part in found.values() for nats in of_part)
    unchanged = LayerRanking(parts.model, parts.layers, parts.layers, parts.windows, "cosine")
    same = unchanged.divergences(lambda: None)
    assert all(abs(nats) < 1e-6 for of_part in same.values() for nats in of_part)


def test_halves_share_the_loss_of_all_of_them_and_a_profile_without_them_gets_them(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(folder, text)
    config, path = read_config(folder), profile_path(folder, "int4")
    found = json.loads(path.read_text())
    halves = {"attention": [0.01, 0.03, 0.0, 0.0], "ffn": [0.0, 0.0, 0.04, 0.02]}
    path.write_text(json.dumps({**found, "halves": halves, "perplexity": [20.0, 0, 0, 0, 21.0]}))
    shares = half_losses(config, ["int4", "int3"])["int4"]
    assert shares["attention"] == pytest.approx([0.005, 0.015, 0, 0]) and sum(
        map(sum, shares.values())
    ) == pytest.approx(0.05)
    path.write_text(json.dumps({**found, "halves": halves, "perplexity": [20.0, 0, 0, 0, 19.0]}))
    assert sum(map(sum, half_losses(config, ["int4"])["int4"].values())) == pytest.approx(
        0.1 * math.expm1(0.1)
    )
    path.write_text(json.dumps({**found, "halves": {"ffn": [0.1]}}))
    assert half_losses(config, ["int4"]) == {}
    path.write_text(json.dumps({**found, "halves": {}, "perplexity": [20.0, 0, 0, 0, 20.8]}))
    evenly = half_losses(config, ["int4"])["int4"]
    assert evenly == {part: pytest.approx([0.005] * LAYERS) for part in ("attention", "ffn")}
    path.write_text(json.dumps({**found, "halves": {}}))
    monkeypatch.setattr(LayerRanking, "_degradation", None)  # no trial of the order is run
    monkeypatch.setattr(LayerRanking, "swap", None)
    assert profile(folder, text) == 0
    assert json.loads(path.read_text()) == found


def test_the_loss_is_that_of_all_layers_and_of_what_is_served(folder: Path, text: Path) -> None:
    config = read_config(folder)
    assert losses(config, ["full", "int8", "int4"]) == {}
    profile(folder, text)
    path = profile_path(folder, "int4")
    found = json.loads(path.read_text())
    found["perplexity"] = [20.0, 20.1, 20.2, 20.3, 21.0]
    path.write_text(json.dumps(found))
    assert losses(config, ["full", "int8", "int4"]) == {"int4": pytest.approx(0.05)}
    path.write_text(json.dumps({**found, "perplexity": [20.0, 20.1, 20.2, 20.3, 19.9]}))
    assert losses(config, ["int4"]) == {"int4": 0.0}
    others: list[tuple[dict[str, object], str]] = [
        ({"method": "awq"}, "measured with awq, and rtn is served"),
        ({"model": "0" * 64}, "made for another model"),
        ({"precision": "int8"}, "a profile of int8, by another name"),
        ({"perplexity": []}, "has no perplexities"),
    ]
    for other, why in others:
        path.write_text(json.dumps({**found, **other}))
        assert losses(config, ["int4"]) == {}
        known, unknown = half_losses_or_why(config, ["full", "int8", "int4"], "")
        assert known == {} and why in unknown["int4"] and "make it again" in unknown["int4"]
        assert "make one with `instar profile" in unknown["int8"]


def test_weights_and_metric_are_settable(folder: Path, text: Path) -> None:
    assert profile(folder, text, "--weights", "0,0,1", "--metric", "l2", "--precision", "int3") == 0
    found = json.loads(profile_path(folder, "int3").read_text())
    assert (found["weights"], found["metric"]) == ([0, 0, 1], "l2")
    assert found["scores"]["lis"] == found["scores"]["mds"]


def test_plain_orders_need_no_profile(folder: Path) -> None:
    assert load_order(folder) == ([0, 1, 2, 3], "front-to-back")
    assert load_order(folder, "back-to-front") == ([3, 2, 1, 0], "back-to-front")
    order, name = load_order(folder, "random")
    assert (sorted(order), name) == ([0, 1, 2, 3], "random")
    assert load_order(folder, "random")[0] == order, "the same for every worker"


def test_a_missing_profile_and_an_unknown_order_say_what_to_do(folder: Path) -> None:
    with pytest.raises(ModelError, match="has none: make one with `instar profile"):
        load_order(folder, "profile")
    with pytest.raises(ModelError, match="layer_order = 'sideways': use one of profile, front-to-back"):
        load_order(folder, "sideways")


def test_a_profile_made_for_another_model_is_refused_by_name(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    assert profile(folder, text) == 0
    other = tmp_path / "other"
    make_oracle("llama", vocab_size=400, num_hidden_layers=LAYERS, seed=1).save_pretrained(other)
    shutil.copytree(folder / "instar", other / "instar")
    with pytest.raises(ModelError, match=r"profile-int4.json: made for another model"):
        load_order(other)
    assert load_order(other, "front-to-back")[1] == "front-to-back"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sequence": [0, 1, 2]}, "not one of this model's 4 layers"),
        ({"sequence": [0, 1, 2, 2]}, "not one of this model's 4 layers"),
        ({"sequence": "front"}, "not one of this model's 4 layers"),
        ({"precision": "int3"}, "a profile of int3, by another name"),
        ({"format": 2}, "a profile of format 2, not 1"),
        ({"surprise": 1}, "not a readable profile"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(
    change: dict[str, object], complaint: str, folder: Path, text: Path
) -> None:
    assert profile(folder, text) == 0
    path = profile_path(folder, "int4")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=complaint):
        load_order(folder)


def test_a_damaged_profile_is_refused(folder: Path, text: Path) -> None:
    assert profile(folder, text) == 0
    path = profile_path(folder, "int4")
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ModelError, match=r"profile-int4.json: not a readable profile"):
        load_order(folder)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--weights", "1,2"], "'1,2' is not three numbers"),
        (["--weights", "0,0,0"], "not all zero"),
        (["--weights=-1,1,1"], "weights must be 0 or more"),
        (["--weights", "nan,1,1"], "weights must be 0 or more"),
        (["--precision", "int5"], "invalid choice: 'int5'"),
        (["--windows", "0"], "'0' is not a positive number"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_in_two_lines(
    words: list[str], complaint: str, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        profile(folder, text, *words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 2


def test_a_method_without_a_set_names_the_command(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(folder, text, "--method", "awq") == 2
    assert "instar quantize" in capsys.readouterr().err


def test_the_loss_of_a_kv_cache_in_8_bits_is_measured_once_with_the_first_order(
    folder: Path, text: Path
) -> None:
    config, path = read_config(folder), kv_profile_path(folder)
    loss, why = kv_loss_or_why(config)
    assert loss is None and "make one with `instar profile" in why
    assert profile(folder, text, "--precision", "int8") == 0
    found = json.loads(path.read_text())
    full, in_8_bits = found["perplexity"]
    layers = json.loads(profile_path(folder, "int8").read_text())
    assert full == layers["perplexity"][0] and abs(in_8_bits / full - 1) < 0.01
    assert 0 < found["divergence"] < 0.01
    loss, why = kv_loss_or_why(config)
    assert loss is not None and loss >= max(0.0, in_8_bits / full - 1) and why == ""
    written = path.stat().st_mtime_ns
    assert profile(folder, text, "--precision", "int3") == 0 and path.stat().st_mtime_ns == written


def test_a_kv_cache_in_8_bits_that_gives_no_numbers_has_no_loss(saved: Path) -> None:
    parts = Parts(saved)
    broken = open_layerwise(saved)
    broken._transformer.ends.norm.fill_(math.nan)
    with pytest.raises(ModelError, match=r"its perplexity .* is nan, not a finite number"):
        measure_kv({"full": parts.model, "int8": broken}, parts.layers, parts.windows, lambda: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "another"}, "made for another model"),
        ({"format": 9}, "a profile of format 9, not 1"),
        ({"perplexity": [0.0, 1.0]}, "not a readable profile"),
        ({"perplexity": [float("nan"), 1.0]}, "not numbers"),
        ({"perplexity": []}, "not a readable profile"),
        ({"more": 1}, "not a readable profile"),
    ],
)
def test_a_profile_of_the_kv_cache_that_cannot_be_used_says_why(
    folder: Path, change: dict[str, Any], why: str
) -> None:
    config, path = read_config(folder), kv_profile_path(folder)
    model = checkpoint_digest(config, CheckpointWeights(folder))
    made = KVProfile(model=model, calibration="c", windows=[1, 8], perplexity=[2.0, 2.002], divergence=1e-5)
    write_kv_profile(path, made)
    assert kv_loss_or_why(config)[0] == pytest.approx(0.001)
    path.write_text(json.dumps(asdict(made) | change))
    loss, found = kv_loss_or_why(config)
    assert loss is None and why in found
