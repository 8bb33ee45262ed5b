"""The tokenizer of a model's folder, for the gateway's texts and the workers' grammars.

The `tokenizers` library is used directly: transformers' AutoTokenizer takes seconds and may import torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Tokenizer

from bus.sentencepiece import FILE as SENTENCEPIECE
from bus.sentencepiece import BadSentencePiece, load_sentencepiece


class TokenizerError(Exception):
    """A folder has no usable tokenizer: the message names the folder, what is wrong and what is needed."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of `folder`, which neither cuts nor pads. Raises TokenizerError."""
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
        elif (folder / SENTENCEPIECE).is_file():
            tokenizer = load_sentencepiece(folder)
        else:
            tokenizer = _convert(folder)
    except BadSentencePiece as error:
        raise TokenizerError(str(error)) from error
    except Exception as error:  # the Rust library raises nothing narrower
        one = next((path for path in (file, folder / SENTENCEPIECE) if path.is_file()), folder)
        raise TokenizerError(f"the tokenizer of {one} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _convert(folder: Path) -> Tokenizer:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    converted: Tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    return converted
