"""The compiler of one instance's grammars, with a thread of its own and a cache."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import torch
from llguidance import LLMatcher, LLTokenizer

from bus.grammars import compiling_thread, definition, error_of
from bus.messages import Grammar
from bus.tokenizer_folder import TokenizerError, load_tokenizer
from worker.engine.grammars import Matcher
from worker.grammars.masks import GuidanceMasks
from worker.grammars.matcher import GuidanceMatcher

log = logging.getLogger(__name__)

MAX_CACHED: Final = 256  # compiled grammars of an instance; the one used longest ago goes first


class GuidanceCompiler:
    """A `GrammarCompiler`.

    The engine's thread asks and takes; the tokenizer and the compiled grammars belong to the other one, which
    begins with the first grammar.
    """

    def __init__(self, folder: Path, vocab_size: int, device: torch.device) -> None:
        """Compile for the tokenizer of a model's folder; the model has `vocab_size` tokens on `device`."""
        self.wake: Callable[[], None] = lambda: None
        self.masks = GuidanceMasks(vocab_size, device)
        self._folder, self._vocab_size = folder, vocab_size
        self._threads: ThreadPoolExecutor | None = None
        self._made: SimpleQueue[tuple[int, Matcher | str]] = SimpleQueue()
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @property
    def has_news(self) -> bool:
        """True if `take` returns something."""
        return not self._made.empty()

    def ask(self, ticket: int, grammar: Grammar, token_ids: Sequence[int]) -> None:
        """Make a matcher that has accepted `token_ids`; `take` returns it under `ticket`."""
        if self._threads is None:
            self._threads = compiling_thread("grammars")
        self._threads.submit(self._make, ticket, grammar, list(token_ids))

    def take(self) -> list[tuple[int, Matcher | str]]:
        """Return what was made since the last call: matchers, or why there is none."""
        return [self._made.get_nowait() for _ in range(self._made.qsize())]  # nobody else takes

    def close(self) -> None:
        """End the thread; nothing is asked any more."""
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    # ----------------------------------------------------------------------------- the compiler's thread

    def _make(self, ticket: int, grammar: Grammar, token_ids: list[int]) -> None:
        made: Matcher | str
        try:
            made = self._matcher(grammar, token_ids)
        except BaseException as error:  # the request must end, even if the library panics
            log.exception("a grammar could not be compiled")
            made = f"the grammar could not be compiled: {type(error).__name__}"
        self._made.put((ticket, made))
        self.wake()

    def _matcher(self, grammar: Grammar, token_ids: list[int]) -> Matcher | str:
        try:
            compiled = self._compile(grammar)
        except (TokenizerError, ValueError) as error:
            return f"the grammar cannot be compiled: {error}"
        if compiled.is_error():
            return f"the grammar cannot be compiled: {error_of(compiled)}"
        num_tokens = self._tokenizer(grammar.end_token_ids).vocab_size
        matcher = GuidanceMatcher(compiled.deep_copy(), num_tokens)
        return matcher.accept(token_ids) or matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher at the beginning of a grammar, which is copied, not used.

        Raises TokenizerError, and ValueError for a grammar beyond the limits (`bus.grammars`), which the
        gateway refuses but others on the bus may not.
        """
        if found := self._compiled.get(grammar):
            self._compiled.move_to_end(grammar)
            return found
        text = definition(grammar)
        made = LLMatcher(self._tokenizer(grammar.end_token_ids), text, log_level=0)
        self._compiled[grammar] = made
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)
        return made

    def _tokenizer(self, end_token_ids: tuple[int, ...]) -> LLTokenizer:
        """Return the model's tokens; those in `end_token_ids` end an answer."""
        if end_token_ids not in self._tokenizers:
            tokenizer = load_tokenizer(self._folder)
            size = max(self._vocab_size, tokenizer.get_vocab_size())
            ends = list(end_token_ids) or None
            self._tokenizers[end_token_ids] = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
        return self._tokenizers[end_token_ids]
