"""Tokenizers out of `tokenizer.model` alone: the ids of SentencePiece's own library, and streamed text."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as RustTokenizer

from bus.sentencepiece import BadSentencePiece, load_sentencepiece
from bus.tokenizer_folder import TokenizerError
from gateway.text.tokenizer import Tokenizer
from gateway.text.vocabulary import TextStream
from worker.model.config import ModelError
from worker.offline.calibration import _tokenizer

EXTRA = {"1000": {"content": "<|extra|>", "special": True}, "1001": {"content": "<|tool|>", "special": False}}
TEXTS = [
    "hello world",
    "  two  spaces ",
    "\n\tdef f(self):\n",
    "Größe 🌍🌎 你好\t!",
    "１２ ﬁ",
    "",
    " ",
    "<0x41>",
]


def library() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:12]
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]


def train(folder: Path, kind: str = "bpe", config: dict[str, Any] | None = None, **options: Any) -> Path:
    """Train a model of 1,000 pieces with the library; the folder has no tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, Any] = {
        "model_prefix": str(folder / "tokenizer"),
        "vocab_size": 1000,
        "model_type": kind,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "num_threads": 1,
        "minloglevel": 2,
    }
    text = iter([*library(), *["Größe und 你好, naïve"] * 20])
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=text, **wanted | options)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def own(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def differing(folder: Path, texts: list[str]) -> list[str]:
    ours, theirs = load_sentencepiece(folder), own(folder)
    return [text for text in texts if ours.encode(text, add_special_tokens=False).ids != theirs.encode(text)]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("bpe"), allow_whitespace_only_pieces=True, split_digits=True)


def test_bpe_ids_equal_the_librarys(bpe: Path) -> None:
    assert differing(bpe, [*TEXTS, *library()[:3000]]) == []


def test_unigram_ids_equal_the_librarys_but_for_ties(tmp_path: Path) -> None:
    folder = train(tmp_path, "unigram")
    different = differing(folder, [*TEXTS, *library()[:3000]])
    assert len(different) < 60
    ours, theirs = load_sentencepiece(folder), own(folder)
    for text in different:  # of equal score: the library adds up in float32
        scores = [
            sum(theirs.get_score(i) for i in ids)
            for ids in (ours.encode(text, add_special_tokens=False).ids, theirs.encode(text))
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
        {"byte_fallback": False},
    ],
    ids=["normalised, as T5 and Llama 1's relatives", "no prefix, as Gemma", "no bytes"],
)
def test_what_the_file_says_of_normalising_holds(options: dict[str, Any], tmp_path: Path) -> None:
    texts = [text for text in TEXTS if text.strip() or not options.get("remove_extra_whitespaces")]
    assert differing(train(tmp_path, **options), [*texts, *library()[:500]]) == []


def test_added_tokens_keep_their_ids_and_texts_begin_with_bos(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((bpe / "tokenizer.model").read_bytes())
    config = {
        "added_tokens_decoder": EXTRA,
        "legacy": False,
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    rust = load_sentencepiece(tmp_path)
    assert rust.encode("hi<|extra|>x<|tool|>").tokens == ["<s>", "▁h", "i", "<|extra|>", "x", "<|tool|>"]
    assert rust.token_to_id("<|tool|>") == 1001
    tokenizer = Tokenizer(tmp_path, 1002)
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.vocabulary.special_ids >= {0, 1, 2, 1000}
    assert tokenizer.vocabulary.text_of([1000, 1001]) == "<|tool|>"
    (tmp_path / "tokenizer_config.json").write_text(
        '{"add_bos_token": false, "add_eos_token": true, "eos_token": "</s>"}'
    )
    assert load_sentencepiece(tmp_path).encode("hi").tokens == ["▁h", "i", "</s>"]


def test_older_folders_name_added_tokens_in_a_file_of_their_own(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((bpe / "tokenizer.model").read_bytes())
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 1000}')
    assert load_sentencepiece(tmp_path).token_to_id("<pad>") == 1000
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 1007}')
    with pytest.raises(BadSentencePiece, match=r"'<pad>' has the id 1007 .* and 1000 after the 1000 pieces"):
        load_sentencepiece(tmp_path)


def test_streamed_text_equals_the_decoded_whole(bpe: Path) -> None:
    tokenizer = Tokenizer(bpe, 1000)
    for text in [*TEXTS, *library()[:300]]:
        ids = own(bpe).encode(text)
        stream = TextStream(tokenizer.vocabulary)
        pieces = [stream.feed(token) for token in ids]
        streamed = "".join(pieces) + stream.flush()
        assert streamed.removeprefix(" ") == own(bpe).decode(ids) == text
        assert "�" not in streamed


async def test_the_gateway_serves_a_folder_without_tokenizer_json(bpe: Path) -> None:
    assert not (bpe / "tokenizer.json").exists()
    tokenizer = Tokenizer(bpe, 1000)
    assert await tokenizer.encode("hello world") == [1, *own(bpe).encode("hello world")]
    assert isinstance(_tokenizer(bpe), RustTokenizer)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"IQ== 0\nIg== 1\n", "is not a SentencePiece model"),  # as Llama 3's original, of tiktoken
        (b"", "it has no pieces"),
        (b"\x0a\x40abc", "it ends in the middle of a field, at byte 5"),
        (b"\x0a\x02\x08\x05", "is not a SentencePiece model"),  # a number where a text should be
        (b"\x0a\x03\x0a\x01a\x12\x03\xc0\x02\x09", "cannot be used: "),  # one piece, and unk_id 9
    ],
)
def test_another_file_is_refused_by_name(data: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model") as refused:
        Tokenizer(tmp_path, 0)
    assert complaint in str(refused.value) and "tokenizer.json" not in str(refused.value)
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        _tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("added_tokens.json", "[]", r"added_tokens\.json holds a list; an object is needed"),
        ("added_tokens.json", '{"<pad>": "x"}', r"added_tokens\.json cannot be used: ValueError"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', r"tokenizer_config\.json cannot be used: "),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1000": {}}}', r"_config\.json .*'content'"),
    ],
)
def test_a_damaged_file_beside_it_is_named(
    file: str, text: str, complaint: str, bpe: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes((bpe / "tokenizer.model").read_bytes())
    (tmp_path / file).write_text(text)
    with pytest.raises(BadSentencePiece, match=complaint):
        load_sentencepiece(tmp_path)


def test_word_models_are_refused(tmp_path: Path) -> None:
    folder = train(tmp_path, "word", byte_fallback=False, hard_vocab_limit=False)
    with pytest.raises(BadSentencePiece, match=r"of model_type 3; supported: unigram \(1\) and BPE \(2\)"):
        load_sentencepiece(folder)
