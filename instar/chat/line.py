"""The input line of a terminal, by prompt_toolkit: several lines, recall, completion of commands."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import ColorDepth, create_output

PROMPT = "> "


def line_reader(words: Collection[str], *, has_colour: bool) -> Callable[[], str]:
    """Return a function that reads what the user types: lines up to Enter.

    It raises KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D on an empty line. Nothing is written to a
    file: what was typed is recalled within the chat only.
    """
    bindings = KeyBindings()
    bindings.add("enter")(_accept)
    bindings.add("escape", "enter")(_begin_line)
    session: Any = PromptSession(
        PROMPT,
        multiline=True,  # what is pasted keeps its lines
        prompt_continuation=" " * len(PROMPT),
        key_bindings=bindings,
        history=InMemoryHistory(),
        completer=WordCompleter(sorted(words), sentence=True),
        complete_while_typing=False,
        color_depth=None if has_colour else ColorDepth.DEPTH_1_BIT,
        output=create_output(always_prefer_tty=True),  # standard error where the answers go to a file
    )
    return lambda: str(session.prompt())


def _accept(event: Any) -> None:
    event.current_buffer.validate_and_handle()


def _begin_line(event: Any) -> None:
    event.current_buffer.insert_text("\n")
