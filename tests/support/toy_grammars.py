"""Grammars that need no library: what may come next follows from all tokens before.

So a matcher that is lost, is another's, or has missed a token shows at once: the next mask is wrong, and what
is chosen has not the form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from bus.messages import Grammar
from worker.engine.grammars import Matcher

KINDS = 3  # one token in so many may come next


def form(num_tokens: int) -> Grammar:
    """The form of outputs of so many tokens."""
    return Grammar(kind="regex", text=str(num_tokens))


class ToyMatcher:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.output, self._sum = num_tokens, list[int](), 0

    @property
    def allowed(self) -> int:
        """The remainder, divided by `KINDS`, of each token that may follow."""
        return (31 * self._sum + 7) % 97 % KINDS

    @property
    def is_complete(self) -> bool:
        return len(self.output) == self.num_tokens

    def accept(self, token_ids: Sequence[int]) -> str | None:
        for token in token_ids:
            if token % KINDS != self.allowed or self.is_complete:
                return f"the answer left its grammar at {len(self.output)}: {token}"
            self.output.append(token)
            self._sum += len(self.output) * (token + 1)
        return None


class ToyMasks:
    def __init__(self, vocab_size: int) -> None:
        self._kinds = torch.arange(vocab_size) % KINDS

    def forbidden(self, matchers: Sequence[ToyMatcher]) -> torch.Tensor:
        allowed = torch.tensor([matcher.allowed for matcher in matchers])
        return self._kinds.unsqueeze(0) != allowed.unsqueeze(1)


class ToyGrammars:
    """A `GrammarCompiler`. While `is_held` nothing is compiled, until `release`."""

    def __init__(self, vocab_size: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.masks = ToyMasks(vocab_size)
        self.is_held = self.is_closed = False
        self._asked: list[tuple[int, Grammar, list[int]]] = []
        self._made: SimpleQueue[tuple[int, Matcher | str]] = SimpleQueue()

    @property
    def has_news(self) -> bool:
        return not self._made.empty()

    def ask(self, ticket: int, grammar: Grammar, token_ids: Sequence[int]) -> None:
        assert not self.is_closed
        self._asked.append((ticket, grammar, list(token_ids)))
        if not self.is_held:
            self.release()

    def release(self) -> None:
        """Compile what was asked, and what will be."""
        self.is_held = False
        asked, self._asked = self._asked, []
        for ticket, grammar, token_ids in asked:
            self._made.put((ticket, self._matcher(grammar, token_ids)))
            self.wake()

    def _matcher(self, grammar: Grammar, token_ids: list[int]) -> Matcher | str:
        if not grammar.text.isdecimal():
            return f"the grammar cannot be compiled: {grammar.text}"
        matcher = ToyMatcher(int(grammar.text))
        return matcher.accept(token_ids) or matcher

    def take(self) -> list[tuple[int, Matcher | str]]:
        return [self._made.get_nowait() for _ in range(self._made.qsize())]  # nobody else takes

    def close(self) -> None:
        self.is_closed = True


def chosen(oracle: Any, prompt: list[int], output: list[int], *, has_form: bool = True) -> list[int]:
    """Return the token that a transformers model chooses at each position of an output, by those before it.

    That is the likeliest one, with has_form of those that the form allows. `output` itself, if it is right.
    """
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    matcher, kinds = ToyMatcher(len(output)), torch.arange(logits.shape[1]) % KINDS
    tokens = list[int]()
    for row, token in zip(logits, output, strict=True):
        allowed = row.masked_fill(kinds != matcher.allowed, -torch.inf) if has_form else row
        tokens.append(int(allowed.argmax()))
        if has_form and matcher.accept([token]):
            return tokens
    return tokens
