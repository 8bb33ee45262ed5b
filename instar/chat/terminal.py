"""The edge of a chat: a terminal that reads lines and shows answers, or a pipe with one question."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Final, Protocol

from rich.console import Console

from instar.chat.session import COMMANDS, EndOfChat, Session, is_command, message_of
from instar.client import require_utf8, standard_input_text
from instar.errors import CommandError, InputError

WELCOME: Final = "{model} answers. /help lists the commands, Ctrl-D ends the chat."
STOPPED: Final = "stopped; what came of the answer stays in the conversation"
CUT: Final = "cut: --max-tokens or the model's context is reached; /new begins a new conversation"
# Sequences of control characters would command the terminal.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen(Protocol):
    """A terminal."""

    def read(self) -> str:
        """Return what the user typed. Raises KeyboardInterrupt and EOFError."""

    def write(self, text: str, *, is_thought: bool = False) -> None:
        """Show a piece of an answer."""

    def note(self, text: str) -> None:
        """Show a line that is no answer."""


def talk(session: Session, screen: Screen) -> int:
    """Read and answer until the user ends the chat. Returns exit status 0."""
    screen.note(WELCOME.format(model=session.conversation.model))
    while True:
        try:
            line = screen.read()
        except KeyboardInterrupt:
            screen.note("Ctrl-D or /quit ends the chat")
            continue
        except EOFError:
            return 0
        if not line.strip():
            continue
        try:
            _answer(session, line, screen)
        except EndOfChat:
            return 0
        except CommandError as error:
            screen.note(f"error: {error}")
        except KeyboardInterrupt:
            screen.note(STOPPED)


def _answer(session: Session, line: str, screen: Screen) -> None:
    if is_command(line):
        screen.note(session.obey(line))
        return
    is_open = False  # a line of the answer without its end
    pieces = session.ask(require_utf8(message_of(line)))
    with closing(pieces):
        try:
            for piece in pieces:
                screen.write(piece.text, is_thought=piece.is_thought)
                is_open = not piece.text.endswith("\n")
        finally:
            if is_open:
                screen.write("\n")
    if session.was_cut:
        screen.note(CUT)


def ask_once(session: Session) -> int:
    """Answer the question on standard input, and return exit status 0. Thoughts go to standard error.

    Raises InputError and ServerError.
    """
    text = standard_input_text().strip()
    if not text:
        raise InputError("standard input is empty; write the question to it, or run it in a terminal")
    for piece in session.ask(text):
        out = sys.stderr if piece.is_thought else sys.stdout
        out.write(piece.text)
        out.flush()
    sys.stdout.write("\n")
    return 0


class TerminalScreen:
    """Answers on standard output; the input line and notes on the terminal."""

    def __init__(self, reader: Callable[[], str], *, has_colour: bool) -> None:
        self.read = reader
        self._has_colour = has_colour
        self._notes = Console(stderr=True, no_color=not has_colour)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # an answer may have what the terminal's encoding lacks
                stream.reconfigure(errors="replace")

    def write(self, text: str, *, is_thought: bool = False) -> None:
        text = printable(text)
        sys.stdout.write(f"\x1b[2m{text}\x1b[0m" if is_thought and self._has_colour else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        sys.stdout.flush()
        style = "dim" if self._has_colour else ""
        self._notes.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Return text that commands no terminal: lines and tabs stay, other control characters do not."""
    return _CONTROL.sub("�", text.replace("\r", ""))


def has_colour(environ: Mapping[str, str]) -> bool:
    """Return whether a terminal takes colours: https://no-color.org, and terminals that say they are dumb."""
    return not environ.get("NO_COLOR") and not is_dumb(environ)


def is_dumb(environ: Mapping[str, str]) -> bool:
    """Return whether a terminal moves no cursor, or does not say what it is."""
    return environ.get("TERM", "") in ("", "dumb", "unknown")


def open_screen() -> TerminalScreen:
    """Return the screen of this process's terminal."""
    colour = has_colour(os.environ)
    if is_dumb(os.environ):
        return TerminalScreen(_plain_line, has_colour=False)
    from instar.chat.line import line_reader  # a tenth of a second that a pipe need not wait

    return TerminalScreen(line_reader(COMMANDS, has_colour=colour), has_colour=colour)


def _plain_line() -> str:
    sys.stderr.write("> ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
