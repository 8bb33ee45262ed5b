"""The facts of a checkpoint's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bus.checkpoints import BadCheckpoint, folder_digest

FILES = ("config.json", "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    for name in FILES:
        (tmp_path / name).write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_the_digest_changes_with_the_config_and_the_weights(folder: Path, name: str) -> None:
    before = folder_digest(folder)
    assert folder_digest(folder) == before
    path = folder / name
    text = path.read_text()
    path.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    os.utime(path, ns=(1, 1))  # the same size, and a time that no write would give
    changed = folder_digest(folder)
    assert changed != before
    if name != "config.json":
        path.unlink()
        assert folder_digest(folder) not in (before, changed)


def test_a_file_is_refused_with_what_makes_a_folder_of_it(folder: Path) -> None:
    file = folder / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(BadCheckpoint, match=rf"is a file, not a model folder; `instar convert {file} DIR`"):
        folder_digest(file)


def test_other_files_leave_the_digest(folder: Path) -> None:
    before = folder_digest(folder)
    for name in ("README.md", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("about it")
    (folder / "instar").mkdir()
    (folder / "instar" / "fingerprint.json").write_text("{}")
    assert folder_digest(folder) == before
