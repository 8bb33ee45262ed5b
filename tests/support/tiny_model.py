"""Model folders that hold a tokenizer only: all that a gateway reads of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|end|>"
BOS = "<|bos|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' and loop.first %}{{ raise_exception('the user begins') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
)
TEXT = "the quick brown fox jumps over the lazy dog. Größe, 你好 and 🌍🌎 are words, too. " * 3


def byte_level(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    size: int = 400,
    special: Sequence[str] = (),
) -> Tokenizer:
    """A tokenizer as Llama 3's: a beginning-of-text token before every text; `END` ends an answer.

    special: further special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    added = [AddedToken(token, special=True) for token in (BOS, END, *special)]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=added, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    config = {"bos_token": BOS, "eos_token": END} | (
        {"chat_template": chat_template} if chat_template else {}
    )
    _save(folder, tokenizer, config)
    return tokenizer


def sentencepiece(folder: Path) -> Tokenizer:
    """A tokenizer as Llama 2's and Mistral's: `▁` for spaces, bytes for unknown characters."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _save(folder, tokenizer, {})
    return tokenizer


def _save(folder: Path, tokenizer: Tokenizer, config: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
