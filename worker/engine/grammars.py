"""Interfaces of grammars, by which the engine holds an output to a form without the library that reads it.

A request with a grammar waits outside the scheduler until its grammar is compiled, so no other request waits
for it. Its matcher has accepted every token of its output: those of an earlier attempt when it is made, each
new one as it is chosen. It belongs to the sequence, which keeps it while it is preempted and recomputed, and
while its worker enters a group, leaves it, or loses it. `worker.grammars` implements the interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bus.messages import Grammar

if TYPE_CHECKING:  # the simulator has no torch
    import torch


class Matcher(Protocol):
    """The place of one output in its grammar. Only the engine's thread calls it."""

    @property
    def is_complete(self) -> bool:
        """True if the output has the form, and nothing can follow but the end."""

    def accept(self, token_ids: Sequence[int]) -> str | None:
        """Go on by these tokens; return why the grammar does not allow them, or None."""


class TokenMasks(Protocol):
    """Masks of the tokens that may come next."""

    def forbidden(self, matchers: Sequence[Any]) -> torch.Tensor:
        """Return bool [N, V] for N matchers of one compiler: True for a token that cannot come next."""


class GrammarCompiler(Protocol):
    """Compiles grammars beside the engine's thread, for the tokens of one model.

    `wake` is called, in any thread, when there is something to take.
    """

    wake: Callable[[], None]

    @property
    def masks(self) -> TokenMasks:
        """The masks of its matchers, on the model's device."""

    @property
    def has_news(self) -> bool:
        """True if `take` returns something."""

    def ask(self, ticket: int, grammar: Grammar, token_ids: Sequence[int]) -> None:
        """Make a matcher that has accepted `token_ids`; `take` returns it under `ticket`."""

    def take(self) -> list[tuple[int, Matcher | str]]:
        """Return what was made since the last call: matchers, or why there is none."""

    def close(self) -> None:
        """Compile no more; nothing is asked any more."""
