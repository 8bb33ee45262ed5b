"""Mistakes that show before anything is started: said once, status 2, no process, no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bus.checkpoints import parse_model
from bus.settings import Settings
from instar.cli import main
from instar.serve.models import NamedModel, converted_folder, find_model, served_entries
from instar.serve.preflight import device_problem, settings_problem
from instar.serve.programs import DEMO_MODEL, with_values
from worker.service.start_up import model_folders

Write = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Write:
    def write(*names: str, config: str = '{"model_type": "llama", "num_hidden_layers": 2}') -> Path:
        path = tmp_path / "mine"
        path.mkdir()
        for name in names:
            (path / name).write_text(config if name == "config.json" else "")
        return path

    return write


def complaint(model: str | Path, **worker: str) -> str:
    return settings_problem(with_values(Settings(), "worker", models=[str(model)], **worker))


def test_a_folder_with_config_and_weights_is_let_through(folder: Write) -> None:
    assert complaint(folder("config.json", "model.safetensors")) == ""
    assert complaint(DEMO_MODEL) == ""


def test_a_model_that_is_no_folder_says_what_to_name(folder: Write, tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path}/absent" in complaint(tmp_path / "absent")
    assert "`instar pull ORG/NAME` downloads a model" in complaint("meta-llama/Llama-3.2-1B")
    inside = folder("config.json", "model.safetensors") / "model.safetensors"
    assert f"name a folder, the one it lies in: {inside.parent}" in complaint(inside)
    alone = tmp_path / "model.onnx"
    alone.write_text("")
    assert "name a folder, one in Hugging Face's format" in complaint(alone)


def test_a_gguf_file_is_let_through_and_what_only_has_its_name_is_not(folder: Write, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"<html>")
    assert f"{file} is not a GGUF file, whatever its name says; download it again" in complaint(file)
    file.write_bytes(b"GGUF")
    assert complaint(file) == "" and find_model(str(file)) == NamedModel("model", file)
    assert find_model(f"mine={file}") == NamedModel("mine", file)
    within = folder("a.gguf")
    (within / "a.gguf").write_bytes(b"GGUF")
    assert find_model(str(within)) == NamedModel("mine", within / "a.gguf")
    (within / "b.gguf").write_bytes(b"GGUF")
    assert f"has 2 GGUF files; name one of them: `instar serve {within / 'a.gguf'}`" in complaint(within)
    (within / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    assert f"(a.gguf is not read: weights must be safetensors; `instar serve {within}/a.gguf`" in complaint(
        within
    )


def test_a_converted_gguf_file_is_used_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    monkeypatch.setattr("instar.serve.models.convert", lambda file, folder: folder.mkdir(parents=True))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    entries = [str(DEMO_MODEL), str(file)]
    first = served_entries(entries, said.append)
    assert first == [str(DEMO_MODEL), f"model={converted_folder(file)}"]
    assert served_entries(entries, said.append) == first
    assert said == [f"Converting {file} to {converted_folder(file)} (once)"]
    file.write_bytes(b"GGUF again")
    assert served_entries(entries, said.append) != first and len(said) == 2


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "numba"):
        monkeypatch.setitem(sys.modules, name, None)
    told = settings_problem(Settings())
    assert told.startswith("torch, numba are not installed here; `pip install 'instar[serve]'`")


def test_a_folder_that_is_no_model_says_what_is_missing(folder: Write) -> None:
    path = folder("model.safetensors")
    assert "no config.json in" in complaint(path)
    (path / "config.json").write_text("{oops")
    assert "config.json cannot be read as JSON" in complaint(path)


def test_a_config_without_weights_is_offered_random_ones(folder: Write) -> None:
    path = folder("config.json")
    assert "`--load-format dummy`" in complaint(path)
    assert complaint(path, load_format="dummy") == ""
    (path / "pytorch_model.bin").write_text("")
    assert "pytorch_model.bin is not read: weights must be safetensors" in complaint(path)


def test_random_weights_are_not_offered_where_they_would_be_refused_too(folder: Write) -> None:
    path = folder("config.json", config='{"architectures": ["GPT2LMHeadModel"]}')
    for load_format in ("safetensors", "dummy"):
        told = complaint(path, load_format=load_format)
        assert "architecture GPT2LMHeadModel is not supported; these are: LlamaForCausalLM, " in told
        assert "--load-format dummy" not in told


def test_two_models_of_one_name_are_refused(folder: Write) -> None:
    path = folder("config.json", "model.safetensors")
    settings = with_values(Settings(), "worker", models=[str(path), f"mine={path}"])
    assert "two models are called 'mine'" in settings_problem(settings)


def test_a_model_has_the_name_that_the_worker_gives_it(
    monkeypatch: pytest.MonkeyPatch, folder: Write
) -> None:
    monkeypatch.chdir(path := folder())
    assert parse_model(".") == ("mine", path)
    assert parse_model("other=.") == ("other", path)
    for named, name in (("models/lr=1e-3", "lr=1e-3"), ("other=models/lr=1e-3", "other")):
        assert parse_model(named) == (name, path / "models/lr=1e-3")
        assert model_folders([named]) == {name: path / "models/lr=1e-3"}


@pytest.mark.parametrize("name", ["gpu", "cdua", "cuda:", "cuda:x", "mps"])
def test_an_unknown_device_is_refused(name: str) -> None:
    assert f"is {name!r}; it may be cpu, cuda or cuda:N" in complaint(DEMO_MODEL, device=name)


def test_a_gpu_is_refused_only_where_there_is_certainly_none(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = with_values(Settings(), "worker", device="cuda:1").worker
    monkeypatch.setattr("instar.serve.preflight._may_have_gpu", lambda: False)
    assert "no NVIDIA GPU" in device_problem(worker)
    monkeypatch.setattr("instar.serve.preflight._may_have_gpu", lambda: True)
    assert device_problem(worker) == ""


def test_an_open_address_needs_a_key() -> None:
    settings = with_values(Settings(), "gateway", host="0.0.0.0")
    assert "add `--api-key KEY`" in settings_problem(settings)
    assert settings_problem(with_values(settings, "gateway", api_keys=["knock-knock"])) == ""


@pytest.mark.parametrize(
    "argv",
    [["no/such/model"], ["models"], ["--device", "gpu"], ["--load-format", "gguf"], ["--host", "0.0.0.0"]],
    ids=" ".join,
)
def test_a_mistake_is_said_in_one_line_and_nothing_is_started(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("something was started")

    for name in ("plan_redis", "plan_programs", "_supervise"):
        monkeypatch.setattr(f"instar.commands.serve.{name}", started)
    assert main(["serve", "--port", "0", *argv]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert len(written.err.splitlines()) == 1


def test_the_supervisor_loads_nothing_of_torch() -> None:
    code = (
        "import sys, instar.commands.serve, instar.serve.readiness, instar.serve.preflight\n"
        "print([name for name in ('torch', 'numba', 'transformers', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
