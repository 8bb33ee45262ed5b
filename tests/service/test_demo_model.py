"""The demo model: how it is made (tiny, in seconds) and what is committed."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import MODELS

sys.path.insert(0, str(MODELS))

import train_demo  # the script's own folder is on the path when it runs
from recipe.batches import Batches, Position
from recipe.corpus import (
    Corpus,
    SourceFile,
    is_held_out,
    load_corpus,
    stdlib_root,
    without_near_duplicates,
)
from recipe.evaluation import model_bits, xz_bits
from recipe.export import load_model
from recipe.progress import Progress
from recipe.schedule import Schedule
from recipe.threads import ThreadChoice

DEMO = MODELS / "demo"
PAGE_BYTES = 64 * 1024
MAX_FOLDER_BYTES = 24 * 10**6


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def read_json(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((DEMO / name).read_text())
    return content


def test_the_split_is_by_whole_files_and_disjoint(corpus: Corpus) -> None:
    train, held_out = ({f.path for f in side} for side in (corpus.train, corpus.held_out))
    assert not train & held_out
    assert all(is_held_out(path) for path in held_out)
    assert not any(is_held_out(path) for path in train)
    assert 200_000 < corpus.held_out_bytes < 1_500_000  # the library differs by version


def test_the_split_is_the_same_every_time() -> None:
    package = stdlib_root() / "email"
    assert load_corpus(package) == load_corpus(package)
    sides = {path: is_held_out(path) for path in ("doctest.py", "textwrap.py", "ast.py", "json/decoder.py")}
    assert sides == {"doctest.py": True, "textwrap.py": True, "ast.py": False, "json/decoder.py": False}


def test_a_near_copy_is_dropped_and_a_different_file_is_kept() -> None:
    original = SourceFile("a.py", "\n".join(f"first_value_{i} = {i}" for i in range(20)))
    copy = replace(original, path="b.py", text=original.text.replace("= 7", "= 8"))
    other = SourceFile("c.py", "\n".join(f"second_value_{i} = {i}" for i in range(20)))
    assert list(without_near_duplicates(iter([original, copy, other]))) == [original, other]


def test_rows_repeat_for_a_seed_and_resume_where_they_stopped() -> None:
    documents = [torch.arange(i, i + 40, dtype=torch.int32) for i in range(0, 4000, 40)]
    whole = Batches(documents, 64, seed=1, position=Position())
    rows = [whole.next(4, 64) for _ in range(3)]
    resumed = Batches(documents, 64, seed=1, position=Position(epoch=0, next_chunk=8))
    assert torch.equal(resumed.next(4, 64), rows[2])
    assert torch.equal(whole.next(2, 32)[:, -1], whole.next(2, 32)[:, 0])  # slices of a chunk follow on


def test_the_schedule_ends_on_time_and_forgives_a_stop() -> None:
    schedule = Schedule(budget_s=100.0)
    schedule.count_step(40.0, is_first_of_shape=True)
    assert schedule.active_s == 0.0  # compilation is not training
    for _ in range(10):
        schedule.count_step(1.0, is_first_of_shape=False)
    schedule.count_step(3600.0, is_first_of_shape=False)  # stopped for an hour
    assert schedule.active_s == pytest.approx(13.0)
    schedule.finish_within(2.0)
    before = schedule.lr_factor
    schedule.count_step(1.0, is_first_of_shape=False)
    assert 0.0 < schedule.lr_factor < before
    schedule.finish_within(0.0)  # a second signal
    assert schedule.is_done
    assert schedule.lr_factor == 0.0


def test_a_finished_schedule_can_be_extended() -> None:
    schedule = Schedule(budget_s=10.0, active_s=10.0)
    more = schedule.extended(5.0)
    assert schedule.is_done
    assert not more.is_done
    assert more.has_long_rows
    assert more.lr_factor == pytest.approx(0.5)
    more.count_step(4.0, is_first_of_shape=False)
    assert more.lr_factor == pytest.approx(0.1)


def test_sigterm_ends_training_early_and_the_checkpoint_goes_on(tmp_path: Path, corpus: Corpus) -> None:
    plan = train_demo.smoke_plan(tmp_path, corpus)
    trainer = train_demo.make_trainer(replace(plan, schedule=Schedule(budget_s=3600.0)))
    trainer.run(Progress(every_s=60.0), lambda: os.kill(os.getpid(), signal.SIGTERM), early_export_s=0.05)
    assert trainer.schedule.is_done
    trainer.save()
    other = train_demo.make_trainer(plan)
    other.resume()
    assert other.counts == trainer.counts
    assert other.position == trainer.position
    for ours, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_faster_thread_count_wins() -> None:
    threads = torch.get_num_threads()
    choice = ThreadChoice((1, 2))
    try:
        for _ in range(60):
            choice.begin_step()
            choice.end_step(1.0 if choice.used == 1 else 3.0)
        choice.begin_step()
        assert choice.step_s[1] < choice.step_s[2]
        assert choice.used == 1 or choice.num_steps % 12 == 0
    finally:
        torch.set_num_threads(threads)


def test_the_script_makes_a_whole_model_folder_in_seconds(tmp_path: Path) -> None:
    train_demo.main(["--smoke", "--work", str(tmp_path)])
    made = tmp_path / "smoke"
    assert json.loads((made / "eval.json").read_text())["model_bits_per_byte"] < 8
    lean = load_model(made)
    reference = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    tokens = torch.randint(0, 512, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(lean(tokens), reference(input_ids=tokens).logits)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "naïve 🙂🏽 日本語 \u200d\ufeff",
        "\r\n\t mixed \r ends\n\n\n",
        "",
        "a\x00b <|end|>",
    ],
)
def test_the_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_the_chat_template_uses_the_role_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids[0] == tokenizer.bos_token_id
    assert [i for i in ids if i < 6] == tokenizer.convert_tokens_to_ids(
        ["<|bos|>", "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>"]
    )


def test_the_committed_folder_has_the_shape_the_system_is_measured_on() -> None:
    config = read_json("config.json")
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    assert isinstance(hidden, int) and isinstance(ffn, int)
    assert int(str(config["num_hidden_layers"])) >= 8
    assert int(str(config["num_key_value_heads"])) >= 4
    assert int(str(config["max_position_embeddings"])) >= 2048
    assert config["tie_word_embeddings"] is True
    for bytes_per_value in (2, 4):
        assert ffn % (PAGE_BYTES // (hidden * bytes_per_value)) != 0
    assert sum(f.stat().st_size for f in DEMO.iterdir()) < MAX_FOLDER_BYTES


def test_generation_ends_at_the_end_of_a_reply_or_a_file() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    stops = tokenizer.convert_tokens_to_ids(["<|eos|>", "<|end|>"])
    assert read_json("generation_config.json")["eos_token_id"] == stops


def test_the_recorded_evaluation_beats_xz() -> None:
    score = read_json("eval.json")
    assert float(str(score["model_bits_per_byte"])) < float(str(score["xz_bits_per_byte"]))


def test_the_committed_weights_beat_xz_on_a_held_out_slice(corpus: Corpus) -> None:
    """A few KB only, so xz has little to refer to; the whole comparison is `train_demo.py --eval-only`."""
    file = next(f for f in corpus.held_out if 6_000 < f.num_bytes < 60_000)
    text = file.text[:6_000]
    bits, _ = model_bits(load_model(DEMO), Tokenizer.from_file(str(DEMO / "tokenizer.json")), [text])
    assert bits < xz_bits([text])
    assert bits / len(text.encode()) < 2.5  # far from chance whatever the Python version
