"""The requests of an instance that wait for their grammars, before they enter the scheduler's queue."""

from __future__ import annotations

from collections.abc import Iterator

from bus.messages import Grammar
from worker.engine.grammars import GrammarCompiler, Matcher
from worker.engine.sequence import Sequence


class GrammarQueue:
    """Sequences whose grammars are being compiled, in the order in which they came."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """compiler: None where no request has a grammar."""
        self._compiler = compiler
        self._seqs: dict[int, Sequence] = {}  # by ticket
        self._num_asked = 0  # the last ticket

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())

    @property
    def has_news(self) -> bool:
        """True if `take` may return something."""
        return bool(self._seqs and self._compiler and self._compiler.has_news)

    def add(self, seq: Sequence, grammar: Grammar) -> None:
        """Have the grammar of `seq` compiled."""
        assert self._compiler, "who has no compiler takes no grammars"
        self._num_asked += 1
        self._seqs[self._num_asked] = seq
        self._compiler.ask(self._num_asked, grammar, seq.request.sent_token_ids)

    def take(self) -> Iterator[tuple[Sequence, Matcher | str]]:
        """Yield the sequences whose wait has ended, each with its matcher or with why there is none."""
        for ticket, made in self._compiler.take() if self._seqs and self._compiler else ():
            if seq := self._seqs.pop(ticket, None):  # else it was removed
                yield seq, made

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence that has ended. Returns whether it was here."""
        ticket = next((ticket for ticket, one in self._seqs.items() if one is seq), None)
        if ticket is None:
            return False
        del self._seqs[ticket]
        return True

    def close(self) -> None:
        """Have nothing compiled any more."""
        if self._compiler:
            self._compiler.close()
