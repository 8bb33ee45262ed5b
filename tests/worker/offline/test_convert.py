"""`instar convert`: .bin checkpoints that torch wrote become safetensors; files with code do not."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.common.oracles import make_oracle
from tests.support.tiny_model import byte_level
from worker.model import ModelError, read_config
from worker.model.layout import plan_model
from worker.model.sources import CheckpointWeights
from worker.offline import bin_checkpoint, bin_shard
from worker.offline.__main__ import main
from worker.offline.bin_checkpoint import convert_bin

SIZES = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
Named = dict[str, torch.Tensor]


def make_bin(folder: Path, num_shards: int = 1, **options: Any) -> Named:
    """Write a checkpoint as transformers 4 did, with all dtypes that occur; return its tensors."""
    oracle = make_oracle("llama", **SIZES, **options)
    oracle.config.save_pretrained(folder)
    byte_level(folder)
    tensors = dict(oracle.state_dict())
    names = sorted(tensors)
    tensors[names[0]] = tensors[names[0]].to(torch.bfloat16)
    tensors[names[1]] = tensors[names[1]].half()
    if num_shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    of = {
        name: f"pytorch_model-{i % num_shards + 1:05}-of-{num_shards:05}.bin"
        for i, name in enumerate(tensors)
    }
    for file in set(of.values()):
        torch.save({name: t for name, t in tensors.items() if of[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": of}))
    return tensors


def read(folder: Path) -> Named:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(folder: Path, tensors: Named) -> None:
    found = read(folder)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def check(folder: Path) -> None:
    """The converted folder has every tensor of the model that a worker reads."""
    plan = plan_model(read_config(folder), torch.float32, 4096, 1)
    CheckpointWeights(folder).check([source for part in plan.ranges() for source in part.sources])


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_tensors_are_the_same_bit_for_bit(
    num_shards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = make_bin(tmp_path / "m", num_shards)
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "made")]) == 0
    assert_same(tmp_path / "made", tensors)
    check(tmp_path / "made")
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert not [name for name in names if "bin" in name or "part" in name]
    assert ("model.safetensors" in names) == (num_shards == 1)
    assert not list(tmp_path.glob(".*"))
    output = capsys.readouterr().out
    assert "convert: " in output and f"{tmp_path / 'made'}: " in output


def test_a_large_file_becomes_several_and_an_index(tmp_path: Path) -> None:
    tensors = make_bin(tmp_path / "m")
    convert_bin(tmp_path / "m", tmp_path / "made", group_bytes=100_000)
    assert len(list((tmp_path / "made").glob("model-*-of-*.safetensors"))) > 3
    assert_same(tmp_path / "made", tensors)
    check(tmp_path / "made")
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_tied_and_strided_tensors_and_older_files_are_read(tmp_path: Path) -> None:
    tensors = make_bin(tmp_path / "m")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # one storage, two names
    tensors["model.layers.0.mlp.down_proj.weight"] = (
        tensors["model.layers.0.mlp.down_proj.weight"].T.contiguous().T
    )
    torch.save(tensors, tmp_path / "m" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    convert_bin(tmp_path / "m", tmp_path / "made")
    assert_same(tmp_path / "made", tensors)


class Evil:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_code_in_a_bare_pickle_is_not_run(tmp_path: Path) -> None:
    mark, file = tmp_path / "it-ran", tmp_path / "x.bin"
    file.write_bytes(pickle.dumps({"x": Evil(mark)}, protocol=2))
    with pytest.raises(bin_shard.Refused, match=r"it holds more than tensors: .*code in a file is never run"):
        bin_shard.read_bin(file)
    assert not mark.exists()


def test_code_in_a_file_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_bin(tmp_path / "m")
    mark, file = tmp_path / "it-ran", tmp_path / "m" / "pytorch_model.bin"
    torch.save({"x": Evil(mark)}, file)
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "made")]) == 2
    assert not mark.exists()
    error = capsys.readouterr().err
    assert "pytorch_model.bin: it holds more than tensors: " in error and "system" in error
    assert "code in a file is never run" in error
    assert not (tmp_path / "made").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([torch.zeros(2)], "it holds a list, not tensors by name"),
        ({"state_dict": {"a": torch.zeros(2)}}, "'state_dict' in it is a dict, not a tensor"),
        ({"a": torch.zeros(2).to_sparse()}, "only plain dense tensors are supported"),
        ({}, "it holds no tensors"),
    ],
)
def test_what_holds_no_plain_tensors_is_refused(content: Any, complaint: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(bin_shard.Refused, match=complaint):
        bin_shard.read_bin(tmp_path / "x.bin")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    make_bin(tmp_path / "m")
    file = tmp_path / "m" / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:50_000])
    with pytest.raises(bin_shard.Refused, match=r"it (cannot be read|holds more than tensors): "):
        bin_shard.read_bin(file)


def test_a_file_gets_no_more_memory_than_its_size_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bin(tmp_path / "m")
    torch.save({"a": torch.zeros(64 << 20, dtype=torch.uint8)}, tmp_path / "m" / "pytorch_model.bin")
    monkeypatch.setattr(bin_checkpoint, "_SPARE_BYTES", -40 << 20)  # it can be mapped, and not be copied
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: it does not fit in 91 MiB beside torch"):
        convert_bin(tmp_path / "m", tmp_path / "made", group_bytes=1 << 20)
    assert not list(tmp_path.glob(".*"))


def test_a_small_file_makes_no_large_one(tmp_path: Path) -> None:
    stored = torch.zeros(1).expand(1 << 30)  # 4 bytes in the file, 4 GiB as a tensor
    torch.save({"a": stored}, tmp_path / "x.bin")
    assert (tmp_path / "x.bin").stat().st_size < 5000
    with pytest.raises(
        bin_shard.Refused, match=r"tensors have 4294967296 bytes and it has \d+; at most 4 times"
    ):
        bin_shard.read_bin(tmp_path / "x.bin")


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    torch.save({"x" * 100_000: 1}, tmp_path / "x.bin")
    with pytest.raises(bin_shard.Refused, match=r"^'x{99}\.\.\. in it is a int"):
        bin_shard.read_bin(tmp_path / "x.bin")


def test_a_file_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bin(tmp_path / "m")
    monkeypatch.setattr(bin_checkpoint, "_LEAST_S", 0.001)
    monkeypatch.setattr(bin_checkpoint, "_BYTES_PER_S", 1e12)
    with pytest.raises(ModelError, match=r"ended with its time; it may take \d+ MiB and 0 s"):
        convert_bin(tmp_path / "m", tmp_path / "made")


@pytest.mark.slow
def test_an_error_of_the_disk_keeps_what_was_made(tmp_path: Path) -> None:
    tensors, unfinished = make_bin(tmp_path / "m", 2), tmp_path / ".made.converting"
    blocked = unfinished / "part-00001-001.safetensors"
    blocked.mkdir(parents=True)  # no file can be written there
    with pytest.raises(ModelError, match=r"an error of the system: .*converting keeps the files .* again"):
        convert_bin(tmp_path / "m", tmp_path / "made")
    kept = (unfinished / "part-00000-001.safetensors").stat().st_mtime_ns
    blocked.rmdir()
    convert_bin(tmp_path / "m", tmp_path / "made")
    assert_same(tmp_path / "made", tensors)
    assert kept in {path.stat().st_mtime_ns for path in (tmp_path / "made").glob("*.safetensors")}


def test_what_is_no_config_tokenizer_or_licence_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_shard(path: Path, folder: Path, *_: Any) -> dict[str, dict[str, int]]:
        (folder / "part-00000-001.safetensors").write_text("")
        return {"part-00000-001.safetensors": {}}

    monkeypatch.setattr(bin_checkpoint, "_convert_shard", convert_shard)
    make_bin(tmp_path / "m")
    for name in ("tf_model.h5", "flax_model.msgpack", "x.ckpt", "x.gguf", "x.pkl", "LICENSE", "README.md"):
        (tmp_path / "m" / name).write_text("")
    convert_bin(tmp_path / "m", tmp_path / "made")
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names >= {"LICENSE", "README.md", "tokenizer.json", "model.safetensors"}
    assert not [name for name in names if name.endswith((".h5", ".msgpack", ".ckpt", ".gguf", ".pkl"))]


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    weight_map = dict.fromkeys(make_bin(tmp_path / "m"), "pytorch_model.bin")
    index = tmp_path / "m" / "pytorch_model.bin.index.json"
    for name, file, complaint in (
        ("model.extra", "pytorch_model.bin", r"index\.json names 'model\.extra', and no file has it"),
        ("x", "../other.bin", r"names the file '\.\./other\.bin', which is not in this folder"),
        ("x", "gone.bin", r"shard 'gone\.bin' is missing"),
    ):
        index.write_text(json.dumps({"weight_map": {**weight_map, name: file}}))
        with pytest.raises(ModelError, match=complaint):
            convert_bin(tmp_path / "m", tmp_path / "made")
        assert not (tmp_path / "made").exists()


def test_folders_that_cannot_be_converted_are_named(tmp_path: Path) -> None:
    make_bin(tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "made")
    (tmp_path / "made" / "model.safetensors").touch()
    with pytest.raises(ModelError, match="made: exists already"):
        convert_bin(tmp_path / "m", tmp_path / "made")
    with pytest.raises(ModelError, match="has safetensors already"):
        convert_bin(tmp_path / "made", tmp_path / "other")
    (tmp_path / "m" / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"neither pytorch_model\.bin nor pytorch_model\.bin\.index\.json"):
        convert_bin(tmp_path / "m", tmp_path / "other")


@pytest.mark.slow
def test_a_killed_run_is_continued(tmp_path: Path) -> None:
    tensors = make_bin(tmp_path / "m", 4)
    command = [sys.executable, "-m", "worker.offline", "convert", str(tmp_path / "m"), str(tmp_path / "made")]
    unfinished = tmp_path / ".made.converting"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not list(unfinished.glob(".part-*.json")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "made").exists()
    kept = {path: path.stat().st_mtime_ns for path in unfinished.glob("part-00000-*")}
    assert kept
    convert_bin(tmp_path / "m", tmp_path / "made")
    assert_same(tmp_path / "made", tensors)
    made = {path.stat().st_mtime_ns for path in (tmp_path / "made").glob("*.safetensors")}
    assert set(kept.values()) <= made  # not made again
    assert not list(tmp_path.glob(".*")) and not list((tmp_path / "made").glob("*part-*"))
