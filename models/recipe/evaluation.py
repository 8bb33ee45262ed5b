"""Bits per byte on the held-out files: the saved model against xz at its strongest."""

import json
import lzma
import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from recipe.corpus import SourceFile
from recipe.network import Llama
from recipe.tokenizer import EOS

EVAL_FILE = "eval.json"


@dataclass(frozen=True, slots=True)
class Score:
    """The contents of eval.json."""

    model_bits_per_byte: float
    xz_bits_per_byte: float
    held_out_files: int
    held_out_bytes: int
    held_out_tokens: int
    python_version: str
    train_minutes: float
    train_tokens: int

    def save(self, folder: Path) -> None:
        """Write eval.json."""
        (folder / EVAL_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def evaluate(
    model: Llama, tokenizer: Tokenizer, files: list[SourceFile], *, train_minutes: float, train_tokens: int
) -> Score:
    """Score `files` with both; every file is scored from scratch by the model, as one stream by xz."""
    num_bytes = sum(f.num_bytes for f in files)
    texts = [f.text for f in files]
    bits, num_tokens = model_bits(model, tokenizer, texts)
    return Score(
        model_bits_per_byte=round(bits / num_bytes, 4),
        xz_bits_per_byte=round(xz_bits(texts) / num_bytes, 4),
        held_out_files=len(files),
        held_out_bytes=num_bytes,
        held_out_tokens=num_tokens,
        python_version=platform.python_version(),
        train_minutes=round(train_minutes, 1),
        train_tokens=train_tokens,
    )


def xz_bits(texts: list[str]) -> int:
    """Bits that `xz -9e` needs for all texts as one stream, so that each may refer to those before it."""
    return 8 * len(lzma.compress("".join(texts).encode(), preset=9 | lzma.PRESET_EXTREME))


def model_bits(model: Llama, tokenizer: Tokenizer, texts: list[str]) -> tuple[float, int]:
    """Bits and number of tokens for `texts`, the <|eos|> that ends each included, <|bos|> given for free."""
    eos_id = tokenizer.token_to_id(EOS)
    sequences = [torch.tensor([*e.ids, eos_id]) for e in tokenizer.encode_batch(texts)]
    nats = sum(_nats(model, sequence) for sequence in sequences)
    return nats / math.log(2), sum(len(s) - 1 for s in sequences)


def _nats(model: Llama, tokens: Tensor) -> float:
    """Tokens [n] -> nats for tokens[1:].

    Windows of the full context overlap by half: the first scores all of its tokens, each later one only its
    second half, so a token of a long file has at least half a window before it.
    """
    device = next(model.parameters()).device
    window = model.shape.context_len
    nats, num_scored = 0.0, 0  # tokens[1 : num_scored + 1] are scored
    for start in range(0, max(1, len(tokens) - 1 - window // 2), window // 2):
        row = tokens[start : start + window + 1].to(device)
        with torch.inference_mode():
            logits = model(row[None, :-1])[0]
        new = num_scored - start  # row's predictions before this one are scored already
        nats += F.cross_entropy(logits[new:], row[new + 1 :], reduction="sum").item()
        num_scored = start + len(row) - 1
    assert num_scored == len(tokens) - 1, "every token is scored once"
    return nats
