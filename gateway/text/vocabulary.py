"""The bytes of every token, and text made from them as tokens come: byte-level BPE and SentencePiece.

A token is a run of bytes, and a character may span several: an incremental decoder holds back the rest.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Mapping
from copy import copy
from functools import cached_property
from typing import Final

from tokenizers import Tokenizer as RustTokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
_Utf8 = codecs.getincrementaldecoder("utf-8")


class UnknownTokenizer(ValueError):
    """The tokenizer turns tokens into text in a way that is not supported."""


class Vocabulary:
    """The bytes of each token.

    `data[id]`: its bytes in a text (none for special tokens). `texts[id]`: the same as text if they are whole
    characters, else None. Ids that the tokenizer does not know (an embedding's padding) are empty.
    """

    def __init__(self, tokenizer: RustTokenizer, size: int) -> None:
        ids = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.size = max(size, max(ids.values(), default=-1) + 1)
        self.is_sentencepiece = not _is_byte_level(tokenizer)
        to_bytes = _sentencepiece if self.is_sentencepiece else _byte_level
        self.names: list[str] = [""] * self.size
        self.data: list[bytes] = [b""] * self.size
        for name, token_id in ids.items():
            self.names[token_id] = name
            self.data[token_id] = name.encode() if token_id in added else to_bytes(name)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        for token_id in self.special_ids:
            self.data[token_id] = b""
        self.texts: list[str | None] = [_whole(data) for data in self.data]
        self.longest = max(map(len, self.data), default=1)

    @cached_property
    def spelled(self) -> Vocabulary:
        """The same vocabulary, in which special tokens are text: their names."""
        spelled = copy(self)
        spelled.data, spelled.texts = list(self.data), list(self.texts)
        for token_id in self.special_ids:
            spelled.texts[token_id] = name = self.names[token_id]
            spelled.data[token_id] = name.encode()
        return spelled

    def label(self, token_id: int) -> str:
        """Return a unique name of the token for people; bytes that are no text are written out."""
        if token_id >= self.size:
            return f"<{token_id}>"
        text = self.names[token_id] if token_id in self.special_ids else self.texts[token_id]
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data[token_id]) if text is None else text

    def bytes_of(self, token_id: int) -> bytes:
        if token_id >= self.size:
            return b""
        return self.names[token_id].encode() if token_id in self.special_ids else self.data[token_id]

    def special_tokens(self, names: Collection[str]) -> dict[int, str]:
        """Return the special tokens of these names by id, those that there are."""
        return {
            token_id: self.names[token_id] for token_id in self.special_ids if self.names[token_id] in names
        }

    def text_of(self, token_ids: list[int]) -> str:
        """Return the whole text of a sequence."""
        stream = TextStream(self)
        return "".join(map(stream.feed, token_ids)) + stream.flush()


class TextStream:
    """The text of a sequence, token by token: whole characters. Bytes that are not UTF-8 become U+FFFD."""

    __slots__ = ("_decoder", "_is_mid_character", "_kept", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, kept: Mapping[int, str] | None = None) -> None:
        """kept: the special tokens that have a text in this sequence, by id; the others have none."""
        self._vocabulary = vocabulary
        self._kept = kept or {}
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_mid_character = False

    def feed(self, token_id: int) -> str:
        if token_id >= self._vocabulary.size:
            return ""
        if self._kept and token_id in self._kept:
            return self.flush() + self._kept[token_id]
        if not self._is_mid_character:
            text = self._vocabulary.texts[token_id]
            if text is not None:
                return text
        if self._decoder is None:
            self._decoder = _Utf8("replace")
        text = self._decoder.decode(self._vocabulary.data[token_id])
        self._is_mid_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        if not self._is_mid_character or self._decoder is None:
            return ""
        self._is_mid_character = False
        return self._decoder.decode(b"", final=True)


def _is_byte_level(tokenizer: RustTokenizer) -> bool:
    """Return True for byte-level BPE, False for SentencePiece. Raises UnknownTokenizer."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise UnknownTokenizer(
        f"its decoder is {sorted(map(str, kinds))}; known are ByteLevel (Llama 3, Qwen) and "
        "ByteFallback or Metaspace (Llama 2, Mistral)"
    )


def _gpt2_bytes() -> dict[str, int]:
    """Return GPT-2's map from characters to bytes (openai/gpt-2, `encoder.py`, `bytes_to_unicode`)."""
    # Printable characters stand for themselves, the other 68 follow U+0100 in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_GPT2_BYTES: Final = _gpt2_bytes()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_GPT2_BYTES[character] for character in token)
    except KeyError:  # not a byte-level token: kept as it is, as the tokenizer's own decoder does
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    """Return the bytes of a token in which `▁` is a space and `<0xE2>` one byte."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
