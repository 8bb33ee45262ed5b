"""Sets of quantised matrices: how they are made, written, resumed and read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import make_oracle
from instar.cli import run_offline
from kernels import quantize_rtn
from tests.support.dense_layers import open_layerwise
from tests.support.families import EVERY_FAMILY
from tests.support.model_folders import Runner
from tests.support.paths import MODELS
from tests.support.tiny_model import byte_level
from tests.support.variant_models import Morphing
from worker.model import ModelError, read_config
from worker.model.quantized_sets import (
    INPUTS,
    MATRICES,
    QuantizedSet,
    SetInfo,
    checksum,
    find_set,
    round_to_nearest,
    set_path,
    write_set,
)
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.offline import quantizer
from worker.offline.__main__ import main
from worker.offline.awq import Moments, activation_aware
from worker.offline.calibration import is_held_out, read_calibration
from worker.shape.copier import GivenUp

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    make_oracle("llama", vocab_size=400).save_pretrained(folder)
    byte_level(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(saved, copy)
    return copy


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path


def quantize(folder: Path, text: Path, *more: str) -> int:
    options = ["--windows", "3", "--window-tokens", "64", "--bits", "4", "--device", "cpu"]
    return main(["quantize", str(folder), "--calibration", str(text), *options, *more])


def opened(folder: Path, precision: str = "int4", method: str = "awq") -> QuantizedSet:
    digest = checkpoint_digest(read_config(folder), CheckpointWeights(folder))
    return QuantizedSet(set_path(folder, precision, method), model=digest)


# --------------------------------------------------------------------------- layer by layer


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_layer_by_layer_gives_the_logits_that_serving_gives(family: str, tmp_path: Path) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    tokens = torch.randint(0, 211, (2, 37), generator=torch.Generator().manual_seed(0))
    model = open_layerwise(tmp_path)
    states = [model.embed(window) for window in tokens]
    for index in range(model.config.num_layers):
        layer = model.layer(index)
        states = [model.run(layer, x) for x in states]
    runner = Runner(tmp_path)
    served = [runner.step({row: tokens[row].tolist()}) for row in range(2)]
    runner.close()
    logits = torch.stack([model.logits(x) for x in states])
    torch.testing.assert_close(logits, torch.stack(served), rtol=1e-4, atol=1e-4)


def test_a_window_in_pieces_of_the_same_weights_changes_nothing(saved: Path) -> None:
    model = open_layerwise(saved)
    layer = model.layer(0)
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(0))
    whole = model.run(layer, x)
    parts = [model.run(layer, x[start:stop], start) for start, stop in ((0, 7), (7, 8), (8, 30))]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_an_observed_layer_reports_what_its_products_read_and_computes_the_same(saved: Path) -> None:
    model = open_layerwise(saved)
    layer, seen = model.layer(1), dict[str, torch.Tensor]()
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    observed = model.run(layer.observed(lambda name, inputs: seen.update({name: inputs.clone()})), x)
    assert torch.equal(observed, model.run(layer, x))
    assert {name: tuple(inputs.shape) for name, inputs in seen.items()} == {
        "qkv": (12, 64),
        "o": (12, 64),
        "gate_up": (12, 64),
        "down": (12, 172),
    }
    normed = torch.nn.functional.rms_norm(x, (64,), layer.attention.input_norm, model.config.norm_eps)
    torch.testing.assert_close(seen["qkv"], normed)


# --------------------------------------------------------------------------- values


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("inputs", [128, 172])
def test_a_rounded_matrix_is_as_near_as_its_steps_are_wide(bits: int, inputs: int) -> None:
    weight = torch.randn(40, inputs, generator=torch.Generator().manual_seed(0))
    dense = round_to_nearest(weight, bits, 32).dense()
    codes, scales, zeros = quantize_rtn(weight, bits, 32)
    groups = torch.arange(inputs) // 32
    expected = (codes.float() - zeros[:, groups].float()) * scales[:, groups].float()
    assert torch.equal(dense, expected)
    assert bool(((dense - weight).abs() <= scales[:, groups].float() * 1.01).all())


@pytest.mark.parametrize("bits", [4, 3])
def test_activation_aware_scales_err_less_than_rounding_where_inputs_differ(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.logspace(-1.5, 1, 128)[torch.randperm(128, generator=generator)]
    x = torch.randn(600, 128, generator=generator) * magnitudes
    weights = {name: torch.randn(48, 128, generator=generator) for name in ("gate", "up")}
    moments = Moments()
    for part in x.split(100):
        moments.add(part)
    made = activation_aware(weights, moments, bits, 64)
    scale = made["gate"].input_scale
    assert scale is not None
    assert torch.equal(scale, made["up"].input_scale)
    for name, weight in weights.items():
        error, plain = (
            float((x @ (matrix.dense() - weight).T).norm())
            for matrix in (made[name], round_to_nearest(weight, bits, 64))
        )
        assert error < 0.8 * plain


def test_moments_of_a_stream_are_those_of_the_whole() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    moments = Moments()
    moments.add(x[:20].view(2, 10, 8))
    moments.add(x[20:])
    torch.testing.assert_close(moments.second, x.T @ x / 50)
    torch.testing.assert_close(moments.magnitude, x.abs().mean(0))


# --------------------------------------------------------------------------- files


def test_the_command_makes_what_the_worker_reads(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(folder, text, "--method", "both") == 0
    assert "3 of 3 layers" in capsys.readouterr().out
    assert find_set(folder, "int4") == set_path(folder, "int4", "awq")
    assert find_set(folder, "int8") is None
    assert not (folder / "instar" / ".unfinished").exists()
    config, checkpoint = read_config(folder), CheckpointWeights(folder)
    for method in ("awq", "rtn"):
        made = opened(folder, method=method).layer(config, 1)
        assert set(made) == set(MATRICES)
        for names in INPUTS.values():
            scales = [made[name].input_scale for name in names]
            assert all(s is None or torch.equal(s, scales[0]) for s in scales)
        full = checkpoint.read("model.layers.1.mlp.down_proj.weight")
        error = (made["mlp.down_proj"].dense() - full).norm() / full.norm()
        assert 0.01 < float(error) < 0.25
    assert quantize(folder, text) == 0
    assert "exists already" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["phi3", "gemma3", "gpt-j", "falcon, new decoder"])
def test_sets_of_families_with_other_tensors_serve(text: Path, tmp_path: Path, family: str) -> None:
    folder, prompt = tmp_path / "model", list(range(40))
    make_oracle(family, vocab_size=400).save_pretrained(folder)
    byte_level(folder)
    loaded = Morphing(folder, tmp_path)
    full = loaded.runner.step({0: prompt})
    loaded.swap_all("int4")
    rounded = loaded.runner.step({1: prompt})
    loaded.close()
    assert quantize(folder, text, "--method", "both") == 0
    made, best = Morphing(folder, tmp_path, method="rtn"), Morphing(folder, tmp_path)
    for each in (made, best):
        each.swap_all("int4")
    assert made.runner.step({0: prompt}).equal(rounded)  # its set is what the weights are rounded to
    aware = best.runner.step({0: prompt})
    assert not aware.equal(rounded)
    assert float((aware - full).norm()) < 1.5 * float((rounded - full).norm())
    made.close()
    best.close()


def test_a_stopped_run_goes_on_and_makes_the_same(
    saved: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("whole", "stopped")]
    for target in folders:
        shutil.copytree(saved, target)
    assert quantize(folders[0], text) == 0
    quantise_layer, calls = quantizer.quantise_layer, []

    def stops_at_the_third(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return quantise_layer(*args)

    monkeypatch.setattr(quantizer, "quantise_layer", stops_at_the_third)
    assert quantize(folders[1], text) == 130
    assert find_set(folders[1], "int4") is None
    assert quantize(folders[1], text) == 0
    assert len(calls) == 4, "the two finished layers are not made again"
    config = read_config(folders[0])
    for layer in range(config.num_layers):
        whole, stopped = (opened(target).layer(config, layer) for target in folders)
        assert {n: checksum(m) for n, m in whole.items()} == {n: checksum(m) for n, m in stopped.items()}


def test_layers_left_by_another_job_are_made_again(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise_layer = quantizer.quantise_layer

    def stops(*args: Any) -> Any:
        raise KeyboardInterrupt

    layers: Iterator[Any] = iter([quantise_layer, stops])
    monkeypatch.setattr(quantizer, "quantise_layer", lambda *args: next(layers)(*args))
    assert quantize(folder, text, "--group", "32") == 130
    monkeypatch.setattr(quantizer, "quantise_layer", quantise_layer)
    assert quantize(folder, text, "--group", "64") == 0
    assert opened(folder).info.group == 64


@pytest.fixture
def made(folder: Path, text: Path) -> Path:
    assert quantize(folder, text, "--method", "rtn") == 0
    return folder


def test_a_truncated_set_is_refused_by_name(made: Path) -> None:
    path = set_path(made, "int4", "rtn")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"int4-rtn.safetensors: damaged or truncated.*instar quantize"):
        opened(made, method="rtn")


def test_a_flipped_bit_is_found_in_its_matrix(made: Path) -> None:
    path = set_path(made, "int4", "rtn")
    content = bytearray(path.read_bytes())
    content[-300] ^= 4
    path.write_bytes(content)
    config, damaged = read_config(made), opened(made, method="rtn")
    with pytest.raises(ModelError, match=r"model\.layers\.\d\.\S+ is damaged: its checksum"):
        for layer in range(config.num_layers):
            damaged.layer(config, layer)


def test_reading_a_large_matrix_can_be_stopped_in_the_middle(tmp_path: Path) -> None:
    matrix = round_to_nearest(torch.randn(3000, 4096), 8, 64)
    info = SetInfo(bits=8, group=64, method="rtn", model="")
    write_set(tmp_path / "set", info, iter([("w", matrix)]))
    stored, pauses = QuantizedSet(tmp_path / "set", model=""), list[None]()

    def give_up() -> None:
        pauses.append(None)
        if len(pauses) == 2:
            raise GivenUp

    with pytest.raises(GivenUp):
        stored.matrix("w", (3000, 4096), give_up)
    assert torch.equal(stored.matrix("w", (3000, 4096)).codes, matrix.codes)


def test_a_set_of_another_model_is_refused(made: Path, tmp_path: Path) -> None:
    make_oracle("llama", vocab_size=400, seed=1).save_pretrained(tmp_path / "other")
    shutil.copytree(made / "instar", tmp_path / "other" / "instar")
    with pytest.raises(ModelError, match="made from another model"):
        opened(tmp_path / "other", method="rtn")


def test_a_plain_checkpoint_in_a_sets_place_is_refused(made: Path) -> None:
    shutil.copy(made / "model.safetensors", set_path(made, "int4", "rtn"))
    with pytest.raises(ModelError, match="no quantised set of format 1"):
        opened(made, method="rtn")


def test_a_set_that_lacks_a_layer_says_which(made: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.9\.mlp\.down_proj\.codes"):
        opened(made, method="rtn").matrix("model.layers.9.mlp.down_proj", (64, 172))
    with pytest.raises(ModelError, match="this model needs"):
        opened(made, method="rtn").matrix("model.layers.1.mlp.down_proj", (64, 300))


def test_the_digest_is_of_the_contents_and_not_the_files(folder: Path, tmp_path: Path) -> None:
    def digest(of: Path) -> str:
        return checkpoint_digest(read_config(of), CheckpointWeights(of))

    other = tmp_path / "sharded"
    make_oracle("llama", vocab_size=400).save_pretrained(other, max_shard_size="60KB")
    assert digest(folder) == digest(other)
    make_oracle("llama", vocab_size=400, rope_theta=5e5).save_pretrained(other, max_shard_size="60KB")
    assert digest(folder) != digest(other)


# --------------------------------------------------------------------------- calibration text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the calibration text is empty"),
        (b" \n", "the calibration text is empty"),
        (b"too short", "tokens are too few to calibrate with: a window has 64"),
        (b"\xff\xfe\x00", "cannot be read as UTF-8 text"),
    ],
)
def test_a_text_that_cannot_calibrate_is_refused(
    content: bytes, complaint: str, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_bytes(content)
    assert quantize(folder, text) == 2
    complained = capsys.readouterr().err
    assert complained.startswith(f"instar quantize: {text}: ")
    assert complaint in complained
    assert not (folder / "instar").exists()


def test_a_text_that_is_not_there_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize(folder, folder / "nothing.txt") == 2
    assert f"{folder / 'nothing.txt'}: there is no such file" in capsys.readouterr().err


def test_the_default_text_has_nothing_of_what_quality_is_measured_on() -> None:
    sys.path.insert(0, str(MODELS))
    from recipe import corpus

    assert all(
        is_held_out(path) == corpus.is_held_out(path) for path in ("a.py", "doctest.py", "textwrap.py")
    )
    first = read_calibration(read_config(MODELS / "demo"), None, 2)
    assert first.tokens.shape == (2, 2048)
    assert first.digest == read_calibration(read_config(MODELS / "demo"), None, 2).digest


def test_an_unusable_device_is_named(folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize(folder, text, "--device", "toaster") == 2
    assert "device 'toaster' cannot be used" in capsys.readouterr().err


# --------------------------------------------------------------------------- as `instar` commands


@pytest.mark.parametrize("command", ["quantize", pytest.param("profile", marks=pytest.mark.slow)])
def test_instar_hands_its_words_to_the_process_that_has_torch(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "instar", command, str(tmp_path / "nothing"), "--windows", "3"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == f"instar {command}: {tmp_path / 'nothing'}: there is no such model folder\n"


@pytest.mark.parametrize("command", ["quantize", "profile"])
def test_where_there_is_no_worker_the_command_says_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run_offline(command, []) == 2
    assert "pip install 'instar[worker]'" in capsys.readouterr().err
