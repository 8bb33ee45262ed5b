"""The text of an answer, divided into thoughts, content and calls as it comes.

A state machine without side effects. However a text is cut into pieces, the parts come out the same; only
what may be the beginning of a marker or of a call waits, and is content in the end if it was neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Final

from gateway.openai.tools.call_reader import AnswerPart, CallReader, PartKind
from gateway.openai.tools.formats import Thought, ToolFormat
from gateway.text.stops import overlap

# Mistral's call before its arguments: a name, perhaps an id; and all that can be the beginning of one.
_NAME: Final = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,16}", re.ASCII)
_NAME_BEGINS: Final = re.compile(r"[\w.\-\[\]]{0,160}\s{0,16}", re.ASCII)


class AnswerParser:
    """Parts of one answer. `num_calls`: those whose arguments are whole. `is_done`: no more calls may come.

    Whitespace beside a thought or a call belongs to neither, and is left out.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        names: Collection[str] = (),
        thought: Thought | None = None,
        *,
        is_thinking: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """names: the tools that may be called; what calls another one is content.

        is_thinking: the prompt ended with the marker that begins a thought.
        """
        self.num_calls = 0
        self.is_done = False
        self._tools, self._names, self._thought = tools or ToolFormat(), names, thought
        self._max_calls = max_calls
        self._parts: list[AnswerPart] = []
        self._rest = ""  # text that is not divided yet
        self._held: list[str] = []  # text that may be a call: content if it is none
        self._blank: list[str] = []  # whitespace that waits for what follows it
        self._drops_blank = is_thinking  # a thought or a call came before it
        self._said: PartKind = "content"  # the kind of the last text
        self._may_think = thought is not None and not is_thinking
        self._in_list = False
        self._is_last = False  # no text follows
        self._reader = CallReader(names)
        self._state: Callable[[], bool] = self._thinking if is_thinking and thought else self._opening

    def feed(self, text: str) -> list[AnswerPart]:
        """Return what can go out."""
        self._rest += text
        return self._run()

    def finish(self) -> list[AnswerPart]:
        """Return the rest: the text has ended."""
        self._is_last = True
        parts = self._run()
        if self._blank and not self._drops_blank and self._said == "content" and not self.is_done:
            parts = merged([*parts, AnswerPart("content", "".join(self._blank))])
        return parts

    def _run(self) -> list[AnswerPart]:
        while not self.is_done and self._state():
            pass
        parts, self._parts = self._parts, []
        return merged(parts)

    # Each state takes text from the beginning of `_rest`. It returns False if it needs more of it.

    def _opening(self) -> bool:
        """Look at how an answer begins, or what follows the thought before it."""
        self._take_blank()
        if not self._rest:
            return False
        if self._may_think and self._thought is not None:
            begin = self._thought.begin
            if self._rest.startswith(begin):
                self._rest = self._rest[len(begin) :]
                self._may_think = False
                self._separate()
                return self._go(self._thinking)
            if begin.startswith(self._rest) and not self._is_last:
                return False
        return self._go(self._calling if self._rest[0] == self._tools.opens else self._content)

    def _thinking(self) -> bool:
        text, is_found = self._text_before(self._thought.end if self._thought else "")
        self._say("reasoning", text)
        if is_found:
            self._separate()
            self._state = self._opening
        return is_found

    def _content(self) -> bool:
        text, is_found = self._text_before(self._tools.begin)
        self._say("content", text)
        if is_found:
            self._held.append(self._tools.begin)
            self._state = self._calling
        return is_found

    def _calling(self) -> bool:
        """Look at what should be a call."""
        text = self._rest.lstrip()
        self._hold(len(self._rest) - len(text))
        if not text:
            return self._is_last and self._give_up()
        if text[0] == "{":
            return self._read(CallReader(self._names))
        if text[0] == "[" and self._tools.has_lists and not self._in_list:
            self._hold(1)
            self._in_list = True
            return True
        return self._go(self._naming) if self._tools.has_names and not self._in_list else self._give_up()

    def _naming(self) -> bool:
        """Read the name of a call whose arguments follow it."""
        at = self._rest.find("{")
        if at < 0:
            may_be_one = not self._is_last and _NAME_BEGINS.fullmatch(self._rest)
            return False if may_be_one else self._give_up()
        match = _NAME.fullmatch(self._rest[:at])
        if match is None or match[1] not in self._names:
            return self._give_up()
        self._hold(at)
        return self._read(CallReader(self._names, match[1]))

    def _reading(self) -> bool:
        reader = self._reader
        num_chars, parts = reader.feed(self._rest)
        self._hold(num_chars)
        if reader.has_begun:
            self._held.clear()
        for part in parts:
            if part.kind == "call":
                self._separate()
            self._parts.append(part)
        if not reader.is_over and not self._is_last:
            return False
        if not reader.has_begun:
            return self._give_up()
        if reader.is_whole:
            self.num_calls += 1
            self.is_done = self.num_calls == self._max_calls
        return self._go(self._after_in_list if self._in_list else self._after)

    def _after(self) -> bool:
        """Look at what follows a call."""
        self._take_blank()
        rest, end, separator = self._rest, self._tools.end, self._tools.separator
        if not rest:
            return False
        if end and rest.startswith(end):
            self._rest = rest[len(end) :]
        elif end.startswith(rest) and not self._is_last:
            return False
        elif rest[0] == separator:
            self._hold(1)
            return self._go(self._calling)
        elif rest[0] == self._tools.opens:
            return self._go(self._calling)
        return self._go(self._content)

    def _after_in_list(self) -> bool:
        """Look at what follows a call in a list."""
        self._take_blank()
        if not self._rest:
            return False
        if self._rest[0] == ",":
            self._hold(1)
            return self._go(self._calling)
        self._in_list = False
        self._rest = self._rest.removeprefix("]")
        return self._go(self._content)

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _read(self, reader: CallReader) -> bool:
        self._reader = reader
        return self._go(self._reading)

    def _give_up(self) -> bool:
        """Make content of what was no call."""
        held, self._in_list = "".join(self._held), False
        self._held.clear()
        self._say("content", held)
        return self._go(self._content)

    def _hold(self, num_chars: int) -> None:
        """Take so many characters for a call."""
        if num_chars:
            self._held.append(self._rest[:num_chars])
            self._rest = self._rest[num_chars:]

    def _text_before(self, marker: str) -> tuple[str, bool]:
        """Take (the text before a marker, whether it was there) and the marker; leave what may begin one."""
        at = self._rest.find(marker) if marker else -1
        if at >= 0:
            text, self._rest = self._rest[:at], self._rest[at + len(marker) :]
            return text, True
        kept = overlap(self._rest, marker) if marker and not self._is_last else 0
        cut = len(self._rest) - kept
        text, self._rest = self._rest[:cut], self._rest[cut:]
        return text, False

    def _take_blank(self) -> None:
        text = self._rest.lstrip()
        if len(text) < len(self._rest):
            self._blank.append(self._rest[: len(self._rest) - len(text)])
            self._rest = text

    def _separate(self) -> None:
        """Note that a thought or a call begins or ends here."""
        self._blank.clear()
        self._drops_blank = True

    def _say(self, kind: PartKind, text: str) -> None:
        """Give out a text; whitespace at its end waits for what follows."""
        said = text.rstrip()
        if said:
            whole = "".join(self._blank) + said
            self._parts.append(AnswerPart(kind, whole.lstrip() if self._drops_blank else whole))
            self._blank.clear()
            self._drops_blank, self._said = False, kind
        if len(said) < len(text):
            self._blank.append(text[len(said) :])


def merged(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Return the parts with neighbours of the same kind in one; each call stays one of its own."""
    out: list[AnswerPart] = []
    for part in parts:
        if out and out[-1].kind == part.kind != "call":
            out[-1] = AnswerPart(part.kind, out[-1].text + part.text)
        else:
            out.append(part)
    return out
