"""Tokenizers out of SentencePiece's own file, `tokenizer.model`, for folders without a `tokenizer.json`.

The file is a protocol buffer (google/sentencepiece, `sentencepiece_model.proto`). Few of its fields matter,
so they are read here, and the tokenizer is built as the published `tokenizer.json` of Llama 2 or Mistral is.
transformers converts too, but takes every model for a BPE one (measured with 5.23), needs two more packages,
and imports torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

FILE: Final = "tokenizer.model"
SPACE: Final = "▁"
_UNIGRAM, _BPE = 1, 2
_NEVER = 1000.0
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


class BadSentencePiece(ValueError):
    """The folder's file cannot be used: the text names it, what is wrong and what is needed."""


@dataclass(slots=True)
class SentencePieceModel:
    """The fields of a file that decide about tokens; the defaults are the format's."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # (text, score, type)
    model_type: int = _UNIGRAM
    has_byte_fallback: bool = False
    unk_id: int = 0
    unk_piece: str = "<unk>"
    bos_piece: str = "<s>"
    charsmap: bytes = b""  # a table of characters that normalise to others
    has_dummy_prefix: bool = True
    removes_extra_spaces: bool = True


def load_sentencepiece(folder: Path) -> Tokenizer:
    """Build the tokenizer of a folder that has a `tokenizer.model`. Raises BadSentencePiece and OSError."""
    path, config_path = folder / FILE, folder / "tokenizer_config.json"
    data = path.read_bytes()
    try:
        model = parse_model(data)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise BadSentencePiece(f"{path} is not a SentencePiece model: {error}") from error
    if model.model_type not in (_UNIGRAM, _BPE):
        raise BadSentencePiece(
            f"{path} is of model_type {model.model_type}; supported: unigram (1) and BPE (2)"
        )
    config = _read_object(config_path)
    is_legacy = config.get("legacy") is not False
    with _naming(path):
        tokenizer = Tokenizer(_bpe(model) if model.model_type == _BPE else _unigram(model))
        tokenizer.normalizer = _normalizer(model, with_prefix=is_legacy)
    if model.has_dummy_prefix and not is_legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] * model.has_dummy_prefix)])
    _add_tokens(tokenizer, model, folder, config)
    with _naming(config_path):
        _add_ends(tokenizer, model, config)
    return tokenizer


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file whose content is used. Raises BadSentencePiece."""
    try:
        yield
    except Exception as error:  # the Rust library raises nothing narrower
        raise BadSentencePiece(f"{path} cannot be used: {type(error).__name__}: {error}") from error


def parse_model(data: bytes) -> SentencePieceModel:
    """Parse a file. Another one raises ValueError, LookupError, TypeError, AttributeError, struct.error."""
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece.get(2, bytes(4)))[0]
            model.pieces.append((piece[1].decode(), score, piece.get(3, _NORMAL)))
        elif number == 2:
            spec = dict(_fields(value))
            model.model_type = spec.get(3, _UNIGRAM)
            model.has_byte_fallback = bool(spec.get(35, 0))
            model.unk_id = spec.get(40, 0)
            model.unk_piece = spec.get(45, b"<unk>").decode()
            model.bos_piece = spec.get(46, b"<s>").decode()
        elif number == 3:
            spec = dict(_fields(value))
            model.charsmap = spec.get(2, b"")
            model.has_dummy_prefix, model.removes_extra_spaces = bool(spec.get(3, 1)), bool(spec.get(4, 1))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a protocol buffer's fields: an int, or the bytes of it."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(data, at)
            case 5:
                size = 4
            case kind:
                raise ValueError(f"a field of kind {kind} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"it ends in the middle of a field, at byte {len(data)}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"a number without end at byte {at}")


def _bpe(model: SentencePieceModel) -> models.BPE:
    """Return the BPE whose merges make the pieces of the highest score first, as SentencePiece does."""
    vocab = {text: i for i, (text, _, _) in enumerate(model.pieces)}
    scores = {text: score for text, score, kind in model.pieces if kind == _NORMAL}
    merges = [
        (-score, vocab[text[:cut]], vocab[text[cut:]], text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    unk = model.unk_piece
    return models.BPE(vocab, pairs, unk_token=unk, fuse_unk=True, byte_fallback=model.has_byte_fallback)


def _unigram(model: SentencePieceModel) -> models.Unigram:
    # Pieces that text must not match, such as `<0x41>` for a byte, score too little to be chosen.
    least = min(score for _, score, _ in model.pieces) - _NEVER
    pieces = [(text, score if kind == _NORMAL else least) for text, score, kind in model.pieces]
    return models.Unigram(pieces, model.unk_id, byte_fallback=model.has_byte_fallback)


def _normalizer(model: SentencePieceModel, *, with_prefix: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.has_dummy_prefix and with_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _add_tokens(
    tokenizer: Tokenizer, model: SentencePieceModel, folder: Path, config: dict[str, Any]
) -> None:
    """Add the model's symbols, then the folder's tokens at their ids. Raises BadSentencePiece."""
    added = {
        i: AddedToken(text, normalized=False, special=kind != _USER_DEFINED)
        for i, (text, _, kind) in enumerate(model.pieces)
        if kind in (_CONTROL, _USER_DEFINED) or i == model.unk_id
    }
    path = folder / "added_tokens.json"
    extra = _read_object(path)
    with _naming(path):
        for text, token_id in extra.items():
            added[int(token_id)] = AddedToken(text, normalized=False, special=False)
    with _naming(folder / "tokenizer_config.json"):
        for token_id, said in config.get("added_tokens_decoder", {}).items():
            flags = {name: bool(said.get(name)) for name in ("lstrip", "rstrip", "normalized", "single_word")}
            added[int(token_id)] = AddedToken(said["content"], special=bool(said.get("special")), **flags)
    for token_id in sorted(added):
        tokenizer.add_tokens([added[token_id]])
        found = tokenizer.token_to_id(added[token_id].content)
        if found != token_id:
            raise BadSentencePiece(
                f"{folder}: the added token {added[token_id].content!r} has the id {token_id} in its configs"
                f" and {found} after the {len(model.pieces)} pieces of {FILE}; ids must follow without gaps"
            )


def _add_ends(tokenizer: Tokenizer, model: SentencePieceModel, config: dict[str, Any]) -> None:
    """Begin texts with the token for it, unless the config says no, and end them if it says so."""
    template, special = "$A", list[tuple[str, int]]()
    for name, is_usual in (("bos", True), ("eos", False)):
        said = config.get(f"{name}_token", model.bos_piece if name == "bos" else "")
        text = str((said.get("content") if isinstance(said, dict) else said) or "")
        token_id = tokenizer.token_to_id(text)
        if token_id is not None and config.get(f"add_{name}_token", is_usual):
            template = f"{text} {template}" if name == "bos" else f"{template} {text}"
            special.append((text, token_id))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} without a file. Raises BadSentencePiece."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise BadSentencePiece(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadSentencePiece(f"{path} holds a {type(value).__name__}; an object is needed")
    return value
