"""The place of one output in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from bus.grammars import error_of


class GuidanceMatcher:
    """A `Matcher`. A form that reaches the library's limits of work has no next token, and accepts none."""

    def __init__(self, inner: LLMatcher, num_tokens: int) -> None:
        """num_tokens: in the tokenizer, which may have more than the model, or fewer."""
        self.inner, self.num_tokens = inner, num_tokens

    @property
    def is_complete(self) -> bool:
        """True if the output has the form, and nothing can follow but the end."""
        return self.inner.is_stopped() and not self.inner.is_error()

    def accept(self, token_ids: Sequence[int]) -> str | None:
        """Go on by these tokens; return why the grammar does not allow them, or None."""
        if self.inner.consume_tokens(list(token_ids)):
            return None
        return f"the answer left its grammar: {error_of(self.inner)}"
