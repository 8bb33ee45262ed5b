"""Windows of tokens to calibrate with, from a text file or the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bus.sentencepiece import FILE as SENTENCEPIECE
from bus.sentencepiece import BadSentencePiece, load_sentencepiece
from worker.model.config import ModelConfig, ModelError

WINDOW_TOKENS = 2048  # the papers' length; shorter for a model of shorter context

# The share of files that the demo model holds out to measure quality on (models/recipe/corpus.py).
_HELD_OUT_ONE_IN = 56


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration text as int64 [windows, tokens of a window]."""

    tokens: torch.Tensor
    source: str

    def __str__(self) -> str:
        windows, tokens = self.tokens.shape
        return f"calibration: {windows} windows of {tokens} tokens of {self.source}"

    @property
    def digest(self) -> str:
        """The SHA-256 of the tokens and their shape."""
        digest = hashlib.sha256(repr(tuple(self.tokens.shape)).encode())
        digest.update(self.tokens.numpy().data)
        return digest.hexdigest()


def read_calibration(
    config: ModelConfig, path: Path | None, num_windows: int, window_tokens: int = 0
) -> Calibration:
    """Read up to `num_windows` windows from the start of the text.

    window_tokens 0 means 2048, or the model's context if that is shorter. Without a path the text is files of
    the standard library, the same each time, none of which the demo model's quality is measured on. Raises
    ModelError: no tokenizer, or a text that is not text, empty, or shorter than a window.
    """
    window_tokens = min(window_tokens or WINDOW_TOKENS, config.max_position_embeddings)
    tokenizer = _tokenizer(config.folder)
    source = str(path) if path else "the standard library of Python"
    texts = iter([_read(path)]) if path else _library()
    wanted, ids = num_windows * window_tokens, list[int]()
    for text in texts:
        ids += tokenizer.encode(text).ids
        if len(ids) >= wanted:
            break
    found = min(len(ids) // window_tokens, num_windows)
    if not found:
        raise ModelError(
            f"{source}: {len(ids)} tokens are too few to calibrate with: a window has {window_tokens};"
            " use a longer text"
        )
    return Calibration(torch.tensor(ids[: found * window_tokens]).view(found, window_tokens), source)


def is_held_out(path: str) -> bool:
    """Return True if a POSIX path in the standard library's folder is kept for measuring quality."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def _library() -> Iterator[str]:
    """Yield the texts in an order that mixes the packages and is the same everywhere: by the path's hash."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (
        path.relative_to(root)
        for path in chain(root.glob("*.py"), root.glob("[!_]*/**/*.py"))
        if "site-packages" not in path.parts and "__pycache__" not in path.parts
    )
    kept = (name for name in names if not is_held_out(name.as_posix()))
    for name in sorted(kept, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest()):
        try:
            yield (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # the library tests odd encodings
            continue


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file; use text like what will be served") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ModelError(f"{path}: the calibration text is empty; use text like what will be served")
    return text


def _tokenizer(folder: Path) -> Tokenizer:
    path, pieces = folder / "tokenizer.json", folder / SENTENCEPIECE
    if not path.is_file() and not pieces.is_file():
        raise ModelError(
            f"{folder}: no {path.name} and no {pieces.name} in it to tokenise the calibration text with"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else load_sentencepiece(folder)
    except BadSentencePiece as error:
        raise ModelError(str(error)) from error
    except Exception as error:
        one = path if path.is_file() else pieces
        raise ModelError(f"{one}: not a readable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
