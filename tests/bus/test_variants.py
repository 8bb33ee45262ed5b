"""Which checkpoint can stand for another, and what is said of how it was pruned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bus.checkpoints import BadCheckpoint
from bus.variants import LOSS_FILE, compare

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(tmp_path / "base")


def test_smaller_sizes_are_told(base: Path, tmp_path: Path) -> None:
    pruned = folder(tmp_path / "v", intermediate_size=96, num_attention_heads=6, num_hidden_layers=3)
    found = compare(pruned, base)
    assert found.unlike == ""
    assert found.pruning == "num_layers 3 of 4, intermediate_size 96 of 128, num_heads 6 of 8"


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", None])
def test_a_tag_of_sparsity_is_told(place: str | None, base: Path, tmp_path: Path) -> None:
    said = {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}
    sparse = folder(tmp_path / "v", **{place: said} if place else said)
    assert compare(sparse, base).pruning == "2:4 sparse"


def test_a_pattern_that_was_found_in_the_weights_is_told(base: Path, tmp_path: Path) -> None:
    sparse = folder(tmp_path / "v")
    assert compare(sparse, base).pruning == ""
    (sparse / LOSS_FILE).parent.mkdir()
    (sparse / LOSS_FILE).write_text('{"pattern": "2:4"}')
    assert compare(sparse, base).pruning == "2:4 sparse"


def test_a_tokenizer_that_is_laid_out_otherwise_is_the_same(base: Path, tmp_path: Path) -> None:
    other = folder(tmp_path / "v")
    (other / "tokenizer.json").write_text('{\n "model": {"vocab": {"a":0} }\n}')
    assert compare(other, base).unlike == ""


@pytest.mark.parametrize(
    ("changes", "files", "words"),
    [
        ({"vocab_size": 101}, {}, "vocab_size in config.json is 101, and 100 in"),
        ({"eos_token_id": 2}, {}, "eos_token_id in config.json is 2"),
        ({}, {"generation_config.json": '{"eos_token_id": [1, 2]}'}, r"generation_config.json is \[1, 2\]"),
        ({}, {"tokenizer.json": '{"model": {"vocab": {"b": 0}}}'}, "tokenizer.json is not that of"),
        ({}, {"tokenizer.model": "pieces"}, "tokenizer.model is not that of"),
        ({}, {"tokenizer_config.json": "{}"}, "the chat_template in tokenizer_config.json is not"),
        ({"max_position_embeddings": 256}, {}, "its context has 256 tokens, and that of .* has 512"),
    ],
)
def test_what_makes_it_another_model_is_named(
    changes: dict[str, Any], files: dict[str, str], words: str, base: Path, tmp_path: Path
) -> None:
    other = folder(tmp_path / "v", **changes)
    for name, text in files.items():
        (other / name).write_text(text)
    assert re.search(words, compare(other, base).unlike)


def test_a_file_that_is_damaged_is_named(base: Path, tmp_path: Path) -> None:
    other = folder(tmp_path / "v")
    (other / "tokenizer.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"tokenizer.json cannot be read as JSON"):
        compare(other, base)
