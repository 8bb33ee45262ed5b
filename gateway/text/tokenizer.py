"""A model's own tokenizer and chat template, from its folder."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bus.tokenizer_folder import TokenizerError, load_tokenizer
from gateway.errors import invalid
from gateway.text.template import ChatTemplate, Messages, content_of, read_template
from gateway.text.vocabulary import UnknownTokenizer, Vocabulary

# Longer texts go to a thread (1.3 us a character: 2,048 block the event loop for 3 ms).
INLINE_CHARS = 2048
INLINE_MESSAGES = 32

_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")


class Tokenizer:
    """One model's tokenizer. `stop_token_ids`: from the generation, model and tokenizer configs together."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Read the folder; takes up to a second for a large vocabulary. Raises TokenizerError."""
        self.folder = folder
        self._config = _read_json(folder / "tokenizer_config.json")
        self._rust = load_tokenizer(folder)
        try:
            self.vocabulary = Vocabulary(self._rust, vocab_size)
        except UnknownTokenizer as error:
            raise TokenizerError(f"the tokenizer of {folder} cannot be used: {error}") from error
        self.stop_token_ids = self._read_stop_ids()
        self._template = read_template(folder, self._config)
        self._bytes_per_token = self.vocabulary.longest if self._rust.normalizer is None else None

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return token ids. `special_tokens`: with the beginning-of-text token, if the model has one."""
        if len(text) <= INLINE_CHARS:
            return list(self._rust.encode(text, add_special_tokens=special_tokens).ids)
        # encode() holds the GIL throughout, encode_batch() releases it (measured with 0.23.3).
        encode = partial(self._rust.encode_batch, [text], add_special_tokens=special_tokens)
        return list((await asyncio.get_running_loop().run_in_executor(_threads, encode))[0].ids)

    def fewest_tokens(self, num_chars: int) -> int:
        """Return a lower bound that costs nothing; 0 if a normaliser could shorten the text."""
        return num_chars // self._bytes_per_token if self._bytes_per_token else 0

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises ApiError 400 if it has none."""
        if self._template is None:
            why = "this model has no chat template (tokenizer_config.json names none)"
            raise invalid(f"{why}; use /v1/completions", "messages", "no_chat_template")
        return self._template

    async def chat_text(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> str:
        """Return the conversation in the format that the model was trained on. Raises ApiError 400.

        tools: those that the model may call, as OpenAI's API has them.
        """
        render = partial(self.template.render, messages, tools)
        num_chars = sum(len(message["content"]) for message in messages)
        has_objects = bool(tools) or any("tool_calls" in message for message in messages)
        if num_chars <= INLINE_CHARS and len(messages) <= INLINE_MESSAGES and not has_objects:
            return render()
        return await asyncio.get_running_loop().run_in_executor(_threads, render)

    def _read_stop_ids(self) -> tuple[int, ...]:
        found: set[int] = set()
        for file in ("generation_config.json", "config.json"):
            value = _read_json(self.folder / file).get("eos_token_id")
            found.update([value] if isinstance(value, int) else value or [])
        eos = content_of(self._config.get("eos_token"))
        token_id = self._rust.token_to_id(eos) if eos else None
        return tuple(sorted(found if token_id is None else found | {token_id}))


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; {} without a file. Raises TokenizerError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}
