"""A chat without its terminal: lines go in, pieces of answers and replies of commands come out."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bus.precisions import PRECISIONS
from instar.chat.conversation import Conversation
from instar.errors import InputError, ServerError
from instar.output.shapes import degrees_text, layers_text
from instar.output.tables import plural
from instar.parser import suggestion

# Name -> (argument, meaning).
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "/model": ("[NAME]", "list the models, or go on with another one"),
    "/shape": ("", "show the model's layers by precision, KV blocks and degree"),
    "/min-precision": ("[NAME]", f"no layer below this from now on: {', '.join(PRECISIONS)}, or off"),
    "/new": ("", "begin a new conversation"),
    "/help": ("", "show this"),
    "/quit": ("", "end the chat; so does Ctrl-D"),
}
HELP_END: Final = (
    "Ctrl-C stops an answer. Alt-Enter begins a new line, Up recalls what was typed. A text that begins with "
    "a slash is written with two: //text."
)


class ChatService(Protocol):
    """The service that answers. Every method raises ServerError."""

    def models(self) -> list[str]:
        """Return the names of the models that are served."""

    def instances(self) -> list[dict[str, Any]]:
        """Return the instances of /admin/state."""

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the choices in the events of a streamed chat."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Text of an answer. Thoughts are shown and not kept, as the models' templates expect it."""

    text: str
    is_thought: bool = False


class EndOfChat(Exception):
    """The user ends the chat."""


class Session:
    """One chat. Raises InputError and ServerError, after which it can go on."""

    def __init__(self, service: ChatService, conversation: Conversation) -> None:
        self._service = service
        self.conversation = conversation
        self.was_cut = False  # the last answer, by max_tokens or the model's context

    def ask(self, text: str) -> Generator[AnswerPiece, None, None]:
        """Yield the answer in pieces. However it ends, what came of it stays in the conversation.

        A question that gets no text at all is not kept, so that it can be asked again.
        """
        said: list[str] = []
        self.was_cut = False
        try:
            for choice in self._service.stream(self.conversation.body_for(text)):
                delta = choice.get("delta") or {}
                self.was_cut = choice.get("finish_reason") == "length"
                if thought := delta.get("reasoning_content"):
                    yield AnswerPiece(thought, is_thought=True)
                if content := delta.get("content"):
                    said.append(content)
                    yield AnswerPiece(content)
        finally:
            if said:
                self.conversation.add(text, "".join(said))

    def obey(self, line: str) -> str:
        """Carry out a command. Returns what to show. Raises EndOfChat."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if name not in COMMANDS:
            raise InputError(
                f"there is no command {name}{suggestion(name, COMMANDS) or '; /help lists them'}"
            )
        if argument and not COMMANDS[name][0]:
            raise InputError(f"{name} takes nothing after it, and {argument!r} was given")
        match name:
            case "/model":
                return self._model(argument)
            case "/shape":
                return self._shape()
            case "/min-precision":
                return self._min_precision(argument)
            case "/new":
                forgotten = plural(self.conversation.num_answers, "answer")
                self.conversation.clear()
                return f"a new conversation; {forgotten} forgotten"
            case "/help":
                return help_text()
            case _:
                raise EndOfChat

    def _model(self, name: str) -> str:
        names = self._service.models()
        if not name:
            return "\n".join(f"{'*' if one == self.conversation.model else ' '} {one}" for one in names)
        if name not in names:
            hint = suggestion(name, names) or f"; there are {', '.join(names)}"
            raise InputError(f"no model {name!r} is served{hint}")
        self.conversation.model = name
        return f"{name} answers from now on, and knows the conversation so far"

    def _shape(self) -> str:
        model = self.conversation.model
        lines = [shape_text(one) for one in self._service.instances() if one.get("model") == model]
        if not lines:
            raise ServerError(f"no instance of {model} is served now; `instar status` shows what is loading")
        return "\n".join(lines)

    def _min_precision(self, name: str) -> str:
        if name == "off":
            self.conversation.min_precision = ""
        elif name:
            if name not in PRECISIONS:
                hint = suggestion(name, PRECISIONS) or f"; there are {', '.join(PRECISIONS)}, and off"
                raise InputError(f"there is no precision {name!r}{hint}")
            self.conversation.min_precision = name
        floor = self.conversation.min_precision
        return f"no layer of an answer is below {floor}" if floor else "answers may use any precision"


def is_command(line: str) -> bool:
    """Return whether a line is a command: it begins with one slash."""
    return line.lstrip().startswith("/") and not line.lstrip().startswith("//")


def message_of(line: str) -> str:
    """Return the text that a line, which is no command, sends: `//text` sends `/text`."""
    stripped = line.lstrip()
    return stripped[1:] if stripped.startswith("//") else line


def help_text() -> str:
    """Return the commands with their meanings."""
    heads = {name: f"{name} {argument}".rstrip() for name, (argument, _) in COMMANDS.items()}
    width = max(map(len, heads.values()))
    rows = [f"  {heads[name]:<{width}}  {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join([*rows, HELP_END])


def shape_text(instance: Mapping[str, Any]) -> str:
    """Return `demo@w0: tp1, layers 5 full, 3 int4 ffn (5-7), KV 25 of 100 blocks`."""
    degree = f"tp{instance.get('tp', 1)}" + (f" pp{stages}" if (stages := instance.get("pp", 1)) > 1 else "")
    if len(set(degrees := instance.get("layer_tp") or [])) > 1:
        degree += f" (layers {degrees_text(degrees)})"
    layers = layers_text(instance.get("layers") or [])
    parts = [degree, f"layers {layers}" if layers else "layers not reported"]
    kv = instance.get("kv") or {}
    if kv.get("blocks"):
        used = "?" if kv.get("used") is None else kv["used"]
        precision = kv.get("precision") or "full"
        parts.append(
            f"KV {used} of {kv['blocks']} blocks" + (f" in {precision}" if precision != "full" else "")
        )
    return f"{instance['id']}: {', '.join(parts)}"
