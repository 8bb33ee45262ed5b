"""Tokens to text, stop strings, log-probabilities: without a server."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from bus.tokenizer_folder import TokenizerError
from gateway.text.stops import StopMatcher
from gateway.text.tokenizer import Tokenizer
from gateway.text.vocabulary import TextStream, UnknownTokenizer, Vocabulary
from tests.support import tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    tiny_model.byte_level(root / "bytes")
    tiny_model.sentencepiece(root / "pieces")
    return {"bytes": root / "bytes", "pieces": root / "pieces"}


def streamed(vocabulary: Vocabulary, ids: list[int]) -> str:
    stream = TextStream(vocabulary)
    return "".join(map(stream.feed, ids)) + stream.flush()


def test_streamed_text_equals_the_decoded_whole_for_any_tokens(folders: dict[str, Path]) -> None:
    rust = RustTokenizer.from_file(str(folders["bytes"] / "tokenizer.json"))
    vocabulary = Vocabulary(rust, 0)
    draw = random.Random(1)
    for _ in range(500):
        ids = draw.choices(range(rust.get_vocab_size()), k=draw.randrange(20))
        assert streamed(vocabulary, ids) == rust.decode(ids, skip_special_tokens=True)


def test_streamed_sentencepiece_text_keeps_spaces_and_joins_bytes(folders: dict[str, Path]) -> None:
    rust = RustTokenizer.from_file(str(folders["pieces"] / "tokenizer.json"))
    vocabulary = Vocabulary(rust, 0)
    ids = rust.encode("hello wörld 🌍").ids
    assert streamed(vocabulary, ids).lstrip(" ") == rust.decode(ids) == "hello wörld 🌍"


def test_a_character_is_given_out_with_its_last_token(folders: dict[str, Path]) -> None:
    rust = RustTokenizer.from_file(str(folders["pieces"] / "tokenizer.json"))
    stream = TextStream(Vocabulary(rust, 0))
    pieces = [stream.feed(token) for token in rust.encode("a🌍b").ids[1:]]
    assert pieces == ["a", "", "", "", "🌍", "b"]


def test_tokens_outside_the_table_have_no_text(folders: dict[str, Path]) -> None:
    vocabulary = Tokenizer(folders["bytes"], 1000).vocabulary
    assert streamed(vocabulary, [999, 5000]) == ""
    assert vocabulary.label(5000) == "<5000>"


def test_special_tokens_have_a_text_where_they_are_asked_for(folders: dict[str, Path]) -> None:
    vocabulary = Tokenizer(folders["bytes"], 1000).vocabulary
    kept = vocabulary.special_tokens([tiny_model.END, "fox"])
    (end,) = kept
    assert kept == {end: tiny_model.END}
    stream = TextStream(vocabulary, kept)
    first_of_four = vocabulary.data.index(b"\xf0")
    assert [stream.feed(token) for token in (first_of_four, end, end)] == [
        "",
        f"\ufffd{tiny_model.END}",
        tiny_model.END,
    ]
    assert stream.feed(vocabulary.names.index(tiny_model.BOS)) == ""


def test_partial_characters_have_a_label_of_their_bytes(folders: dict[str, Path]) -> None:
    rust = RustTokenizer.from_file(str(folders["pieces"] / "tokenizer.json"))
    vocabulary = Vocabulary(rust, 0)
    token = rust.token_to_id("<0xF0>")
    assert token is not None
    assert vocabulary.label(token) == "bytes:\\xf0"
    assert vocabulary.bytes_of(token) == b"\xf0"


def test_a_tokenizer_of_unknown_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownTokenizer, match="ByteLevel"):
        Vocabulary(RustTokenizer(models.BPE()), 0)
    RustTokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        Tokenizer(tmp_path, 0)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path, 0)


def test_end_tokens_come_from_all_configs(folders: dict[str, Path], tmp_path: Path) -> None:
    tiny_model.byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 8}')
    assert Tokenizer(tmp_path, 0).stop_token_ids == (1, 7, 8, 9)


def cut(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        text, is_cut = matcher.feed(piece)
        out += text
        if is_cut:
            return out, True
    return out + matcher.flush(), False


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_stop_strings_are_found_wherever_the_text_is_broken(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    out, is_cut = cut(stops, pieces)
    assert (out, is_cut) == cut(stops, list(text))
    assert is_cut == any(stop in text for stop in stops)
    assert text.startswith(out) and not any(stop in out for stop in stops)
    assert is_cut or out == text


def test_text_is_held_back_only_while_a_stop_string_may_come() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("so E") == ("so ", False)
    assert matcher.feed("N") == ("", False)
    assert matcher.feed("C") == ("ENC", False)
    assert matcher.flush() == ""
