"""One call in the text of an answer, read as it comes: a JSON object with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Final, Literal, NamedTuple

from gateway.openai.tools.formats import ARGUMENTS

PartKind = Literal["content", "reasoning", "call", "arguments"]

_KEYS: Final = ("name", *ARGUMENTS, "id", "type")  # of calls, as models write them
_BLANK: Final = " \t\n\r"
_CLOSES: Final = {"{": "}", "[": "]"}
# What JSON has outside its strings, and Python's True, False and None; anything else ends the call.
_OUTSIDE: Final = frozenset('{}[]:,"+-.0123456789abcdefghijklmnopqrstuvwxyzEFINT' + _BLANK)


class AnswerPart(NamedTuple):
    """A piece of an answer. `text` of a "call" is its name; "arguments" belong to the call before them."""

    kind: PartKind
    text: str


class CallReader:
    """Reads one call, a character at a time, and gives out its arguments as they come.

    `has_begun`: the name is known and arguments have begun, so it is a call. `is_over`: nothing more belongs
    to it; if it has not begun then, it is no call of a known tool. `is_whole`: its arguments have an end.
    """

    def __init__(self, names: Collection[str], name: str | None = None) -> None:
        """names: the tools that there are. name: the call's, if only its arguments are to be read."""
        self.has_begun = self.is_over = self.is_whole = False
        self._names, self._name = names, name
        self._is_bare = name is not None
        self._parts: list[AnswerPart] = []
        self._arguments: list[str] = []  # not given out yet
        self._has_arguments = False
        self._key = ARGUMENTS[0] if self._is_bare else ""
        self._text: list[str] = []  # of the string or number that is being read, without quotes
        self._is_escaped = False
        self._in_string = False
        self._open: list[str] = []  # brackets of the value that is being read
        self._keeps_value = False  # it is the arguments
        self._step: Callable[[str], bool] = self._value_begins if self._is_bare else self._object_begins

    def feed(self, text: str) -> tuple[int, list[AnswerPart]]:
        """Return how many characters belong to the call, and what can go out of it."""
        used = 0
        for char in text:
            if self.is_over or not self._step(char):
                break
            used += 1
        parts, self._parts = self._parts, []
        if self.has_begun and self._arguments:
            parts.append(AnswerPart("arguments", "".join(self._arguments)))
            self._arguments.clear()
        return used, parts

    # Each step takes one character. It returns False for one that does not belong to the call.

    def _object_begins(self, char: str) -> bool:
        return self._go(self._key_begins) if char == "{" else self._end_early()

    def _key_begins(self, char: str) -> bool:
        if char in _BLANK:
            return True
        if char == "}":
            return self._object_ends()
        return self._go(self._in_key) if char == '"' else self._end_early()

    def _in_key(self, char: str) -> bool:
        if not self._is_string_over(char):
            return True
        self._key = self._take_text()
        if self._name is None and self._key not in _KEYS:
            return self._end_early()  # else an answer in JSON would wait for its end
        return self._go(self._key_ends)

    def _key_ends(self, char: str) -> bool:
        if char in _BLANK:
            return True
        return self._go(self._value_begins) if char == ":" else self._end_early()

    def _value_begins(self, char: str) -> bool:
        if char in _BLANK:
            return True
        if char == '"':
            return self._go(self._in_text)
        if char in _CLOSES:
            self._keeps_value = self._is_for_arguments
            if self._key == "name" or (self._keeps_value and char == "["):
                return self._end_early()
            if self._keeps_value:
                self._has_arguments = True
                self._begin()
            self._step = self._in_nested
            return self._in_nested(char)
        if char not in _OUTSIDE or char in "}],:":
            return self._end_early()
        self._text.append(char)
        return self._go(self._in_word)

    def _in_text(self, char: str) -> bool:
        if not self._is_string_over(char):
            return True
        try:
            value = json.loads(f'"{self._take_text()}"', strict=False)
            value.encode()  # half of a surrogate pair is no character
        except ValueError:
            return self._end_early()
        return self._take(value)

    def _in_word(self, char: str) -> bool:
        """Read a number, true, false or null."""
        if char not in _BLANK and char not in ",}":
            self._text.append(char)
            return True if char in _OUTSIDE and char not in '{["]:' else self._end_early()
        word = self._take_text()
        if self._key == "name" or (self._is_for_arguments and word != "null"):
            return self._end_early()
        self._step = self._value_ends
        return self._value_ends(char)

    def _in_nested(self, char: str) -> bool:
        if not self._in_string and char not in _OUTSIDE:
            return self._end_early()
        if self._in_string:
            self._in_string = not self._is_string_over(char, keeps=False)
        elif char == '"':
            self._in_string = True
        elif char in _CLOSES:
            self._open.append(_CLOSES[char])
        elif char in "}]" and self._open.pop() != char:
            return self._end_early()
        if self._keeps_value:
            self._arguments.append(char)
        if not self._open:
            self.is_whole = self.is_whole or self._keeps_value
            self._keeps_value = False
            self.is_over = self._is_bare
            self._step = self._value_ends
        return True

    def _value_ends(self, char: str) -> bool:
        if char in _BLANK:
            return True
        if char == "}":
            return self._object_ends()
        return self._go(self._key_begins) if char == "," else self._end_early()

    def _object_ends(self) -> bool:
        if self._name is None:
            return self._end_early()
        if not self._has_arguments:
            self._arguments.append("{}")
            self._begin()
        self.is_whole = self.is_over = True
        return True

    @property
    def _is_for_arguments(self) -> bool:
        return self._key in ARGUMENTS and not self._has_arguments

    def _take(self, value: str) -> bool:
        """Take a string: the name, arguments as the text of an object, or what does not matter here."""
        if self._key == "name" and self._name is None:
            if value not in self._names:
                return self._end_early()
            self._name = value
            if self._has_arguments:
                self._begin()
        elif self._is_for_arguments:
            if not value.strip().startswith("{"):
                return self._end_early()
            self._has_arguments = self.is_whole = True
            self._arguments.append(value)
            self._begin()
        return self._go(self._value_ends)

    def _begin(self) -> None:
        """Give out the call, if its name is known."""
        if self._name is not None and not self.has_begun:
            self.has_begun = True
            self._parts.append(AnswerPart("call", self._name))

    def _end_early(self) -> bool:
        self.is_over = True
        return False

    def _go(self, step: Callable[[str], bool]) -> bool:
        self._step = step
        return True

    def _is_string_over(self, char: str, *, keeps: bool = True) -> bool:
        """Return True for the quote that ends a string; else note its character."""
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            return True
        if keeps:
            self._text.append(char)
        return False

    def _take_text(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text
