"""`instar chat`: conversation and commands without a terminal, then a terminal and a scripted service."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from instar.chat.conversation import Conversation
from instar.chat.session import (
    COMMANDS,
    AnswerPiece,
    EndOfChat,
    Session,
    help_text,
    is_command,
    message_of,
    shape_text,
)
from instar.chat.terminal import CUT, STOPPED, TerminalScreen, ask_once, has_colour, printable, talk
from instar.cli import main
from instar.errors import InputError, ServerError
from tests.support.cli_gateway import instance
from tests.support.paths import ROOT
from tests.support.terminal import CTRL_C, CTRL_D, terminal
from tests.support.threaded_http import serving

DIM = "\x1b[2m"
FULL = {"attention": "full", "ffn": "full"}
INT4 = {"attention": "full", "ffn": "int4"}


def deltas(*texts: str, finish: str = "stop") -> list[dict[str, Any]]:
    pieces = [{"delta": {"content": text}, "finish_reason": None} for text in texts]
    return [{"delta": {"role": "assistant"}}, *pieces, {"delta": {}, "finish_reason": finish}]


@dataclass
class ScriptedService:
    """Answers every question with `answer`; an exception in it is raised in its place."""

    answer: list[Any] = field(default_factory=lambda: deltas("one ", "two"))
    bodies: list[dict[str, Any]] = field(default_factory=list)
    served: list[str] = field(default_factory=lambda: ["demo", "llama"])
    state: list[dict[str, Any]] = field(default_factory=list)

    def models(self) -> list[str]:
        return self.served

    def instances(self) -> list[dict[str, Any]]:
        return self.state

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        for item in self.answer:
            if isinstance(item, BaseException):
                raise item
            yield item


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def session(service: ScriptedService) -> Session:
    return Session(service, Conversation("demo"))


def said(session: Session, text: str) -> str:
    return "".join(piece.text for piece in session.ask(text))


def test_a_conversation_is_sent_whole_with_each_question(service: ScriptedService, session: Session) -> None:
    assert said(session, "a") == "one two"
    said(session, "b")
    assert service.bodies[0] == {"model": "demo", "messages": [{"role": "user", "content": "a"}]}
    assert service.bodies[1]["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one two"},
        {"role": "user", "content": "b"},
    ]


def test_parameters_go_with_each_question() -> None:
    conversation = Conversation("demo", "Be brief.", "int8", 9, 0.0)
    assert conversation.body_for("a") == {
        "model": "demo",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
        "min_precision": "int8",
        "max_tokens": 9,
        "temperature": 0.0,
    }
    assert conversation.messages == []


def test_thoughts_are_shown_and_not_kept(service: ScriptedService, session: Session) -> None:
    service.answer = [{"delta": {"reasoning_content": "hm"}}, *deltas("yes")]
    assert list(session.ask("a")) == [AnswerPiece("hm", is_thought=True), AnswerPiece("yes")]
    assert session.conversation.messages[-1] == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize("ending", [ServerError("the worker died"), KeyboardInterrupt()])
def test_what_came_of_an_answer_stays_however_it_ended(
    service: ScriptedService, session: Session, ending: BaseException
) -> None:
    service.answer = [*deltas("half")[:2], ending]
    with pytest.raises(type(ending)):
        said(session, "a")
    assert session.conversation.messages[-1]["content"] == "half"
    service.answer = [ending]
    with pytest.raises(type(ending)):
        said(session, "b")
    assert session.conversation.num_answers == 1  # what got no answer can be asked again


def test_an_answer_that_nobody_reads_on_is_kept_too(session: Session) -> None:
    pieces = session.ask("a")
    next(pieces)
    pieces.close()
    assert session.conversation.messages[-1]["content"] == "one "


def test_models_are_listed_and_changed(session: Session) -> None:
    assert session.obey("/model") == "* demo\n  llama"
    assert session.obey("/model  llama ") == "llama answers from now on, and knows the conversation so far"
    assert session.conversation.model == "llama"
    with pytest.raises(InputError, match=r"no model 'llam' is served; did you mean llama\?"):
        session.obey("/model llam")
    with pytest.raises(InputError, match="no model 'xyz' is served; there are demo, llama"):
        session.obey("/model xyz")


def test_the_floor_of_the_precision_is_set_shown_and_taken_back(
    service: ScriptedService, session: Session
) -> None:
    assert session.obey("/min-precision") == "answers may use any precision"
    assert session.obey("/min-precision int8") == "no layer of an answer is below int8"
    said(session, "a")
    assert service.bodies[-1]["min_precision"] == "int8"
    assert session.obey("/min-precision off") == "answers may use any precision"
    said(session, "b")
    assert "min_precision" not in service.bodies[-1]
    with pytest.raises(InputError, match=r"there is no precision 'int88'; did you mean int8\?"):
        session.obey("/min-precision int88")


def test_the_shape_is_that_of_the_model_that_answers(service: ScriptedService, session: Session) -> None:
    with pytest.raises(ServerError, match="no instance of demo is served now"):
        session.obey("/shape")
    kv = {"blocks": 100, "used": 25, "block_tokens": 16}
    mixed = instance("w0", layers=[FULL] * 5 + [INT4] * 3, kv=kv, pp=1)
    service.state = [mixed, instance("w1", model="llama", layers=[FULL] * 2, kv=kv)]
    assert session.obey("/shape") == "demo@w0: tp1, layers 5 full, 3 int4 ffn (5-7), KV 25 of 100 blocks"
    session.obey("/model llama")
    assert session.obey("/shape") == "llama@w1: tp1, layers 2 full, KV 25 of 100 blocks"


def test_the_shape_says_what_is_unusual_and_what_is_unknown() -> None:
    kv = {"blocks": 100, "used": None, "precision": "int8"}
    assert shape_text(instance("w0", "w1", kv=kv, pp=2, layers=None)) == (
        "demo@w0: tp2 pp2, layers not reported, KV ? of 100 blocks in int8"
    )
    changing = instance("w0", "w1", layers=[FULL] * 2, layer_tp=[1, 2], kv={})
    assert shape_text(changing) == "demo@w0: tp2 (layers 0 at tp1, 1 at tp2), layers 2 full"


def test_new_forgets_what_was_said_and_keeps_the_rest(session: Session) -> None:
    session.obey("/min-precision int8")
    said(session, "a")
    assert session.obey("/new") == "a new conversation; 1 answer forgotten"
    assert session.conversation == Conversation("demo", min_precision="int8")


def test_help_names_every_command(session: Session) -> None:
    assert session.obey("/help") == help_text()
    assert all(f"  {name}" in help_text() for name in COMMANDS)
    with pytest.raises(EndOfChat):
        session.obey("/quit")


def test_a_slip_says_what_was_meant(session: Session) -> None:
    with pytest.raises(InputError, match=r"there is no command /shap; did you mean /shape\?"):
        session.obey("/shap")
    with pytest.raises(InputError, match="there is no command /xyzzy; /help lists them"):
        session.obey("/xyzzy")
    with pytest.raises(InputError, match="/new takes nothing after it, and 'now' was given"):
        session.obey("/new now")


def test_two_slashes_send_one() -> None:
    assert (
        is_command("/new") and is_command("  /new") and not is_command("//new") and not is_command("a /new")
    )
    assert message_of("//new thing") == "/new thing" and message_of("a //b") == "a //b"


class FakeScreen:
    """Lines that are typed, and what is shown: answers as they are, notes in brackets."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines = list(lines)
        self.shown = ""

    def read(self) -> str:
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    def write(self, text: str, *, is_thought: bool = False) -> None:
        self.shown += text

    def note(self, text: str) -> None:
        self.shown += f"[{text}]"


def test_a_chat_goes_on_after_errors_and_stops(service: ScriptedService, session: Session) -> None:
    screen = FakeScreen("a", "", KeyboardInterrupt(), "/neww", "\udcff")
    assert talk(session, screen) == 0
    assert screen.shown.partition("]")[2] == (
        "one two\n[Ctrl-D or /quit ends the chat][error: there is no command /neww; did you mean /new?]"
        "[error: the text is not valid UTF-8 (character 0)]"
    )
    service.answer = [*deltas("half")[:2], KeyboardInterrupt()]
    stopped = FakeScreen("a", "/quit", "never read")
    talk(session, stopped)
    assert stopped.shown.endswith(f"]half\n[{STOPPED}]") and stopped.lines == ["never read"]
    service.answer = [ServerError("full")]
    talk(session, refused := FakeScreen("a"))
    assert refused.shown.endswith("][error: full]")
    service.answer = deltas("much\n", finish="length")
    talk(session, cut := FakeScreen("a"))
    assert cut.shown.endswith(f"]much\n[{CUT}]")


def test_an_answer_commands_no_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\r\n\tc\x9bd") == "a�]0;title�b\n\tc�d"


def test_colours_are_for_terminals_that_take_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert has_colour({"TERM": "xterm"})
    for environ in ({"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}, {}):
        assert not has_colour(environ)
    screen = TerminalScreen(lambda: "", has_colour=False)
    screen.write("thought ", is_thought=True)
    screen.note("[b]a note[/b]")
    TerminalScreen(lambda: "", has_colour=True).write("dim", is_thought=True)
    told = capsys.readouterr()
    assert told.out == "thought \x1b[2mdim\x1b[0m" and told.err == "[b]a note[/b]\n"


def test_a_pipe_is_one_question(
    service: ScriptedService,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service.answer = [{"delta": {"reasoning_content": "hm"}}, *deltas("yes")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("/new\nlines\n"))
    assert ask_once(session) == 0
    assert capsys.readouterr() == ("yes\n", "hm")
    assert service.bodies[-1]["messages"][-1]["content"] == "/new\nlines"
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    with pytest.raises(InputError, match="standard input is empty"):
        ask_once(session)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    with pytest.raises(InputError, match=r"standard input is not valid UTF-8 \(byte 1\)"):
        ask_once(session)


@dataclass
class ScriptedGateway:
    """A gateway whose answers to chats are `texts`; the last is followed by silence if `hangs`."""

    url: str
    texts: list[str] = field(default_factory=lambda: ["Hello", ", you."])
    hangs: bool = False
    refusal: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    is_abandoned: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kv = {"blocks": 100, "used": 25}
            known = {
                "/v1/models": {"data": [{"id": "demo"}]},
                "/admin/state": {"instances": [instance("w0", layers=[FULL] * 8, kv=kv)]},
            }
            self._head(200 if self.path in known else 404, "application/json")
            self.wfile.write(json.dumps(known.get(self.path)).encode())

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if script.refusal:
                self._head(400, "application/json")
                self.wfile.write(json.dumps({"error": {"message": script.refusal}}).encode())
                return
            self._head(200, "text/event-stream")
            for choice in deltas(*script.texts)[: -1 if script.hangs else None]:
                self._send(json.dumps({"choices": [choice]}))
            while script.hangs:
                try:
                    self._send(json.dumps({"choices": []}))
                except OSError:
                    script.is_abandoned.set()
                    return
                time.sleep(0.02)
            self._send("[DONE]")

        def _head(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()

        def _send(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        script = ScriptedGateway(url)
        yield script
        script.hangs = False


def words(gateway: ScriptedGateway, *more: str) -> list[str]:
    return [sys.executable, "-m", "instar", "chat", "--url", gateway.url, *more]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **more}


def test_a_chat_in_a_terminal_streams_stops_and_shows_the_shape(gateway: ScriptedGateway) -> None:
    with terminal(words(gateway), environment()) as screen:
        screen.wait_for("demo answers.")
        screen.wait_for_prompt(1)
        screen.ask("Who is there?")
        screen.wait_for("Hello, you.")
        screen.wait_for_prompt(2)
        screen.type("two\x1b\rlines\r")  # Alt-Enter between them
        screen.wait_for("Hello, you.", count=2)
        screen.wait_for_prompt(3)
        screen.ask("/shape")
        screen.wait_for("demo@w0: tp1, layers 8 full, KV 25 of 100 blocks")
        screen.wait_for_prompt(4)
        screen.ask("/min-precision int8")
        screen.wait_for("no layer of an answer is below int8")
        screen.wait_for_prompt(5)
        gateway.hangs = True
        screen.ask("And now?")
        screen.wait_for("Hello, you.", count=3)
        screen.type(CTRL_C)
        screen.wait_for("stopped;")
        assert gateway.is_abandoned.wait(10)
        gateway.hangs, gateway.refusal = False, "the prompt is too long"
        screen.wait_for_prompt(6)
        screen.ask("more")
        screen.wait_for("error: /v1/chat/completions: 400: the prompt is too long")
        screen.wait_for_prompt(7)
        screen.type(CTRL_D)
        assert screen.end() == 0
    assert DIM in screen.raw
    asked = [body["messages"][-1]["content"] for body in gateway.bodies]
    assert asked == ["Who is there?", "two\nlines", "And now?", "more"]
    assert gateway.bodies[3]["messages"][-2]["content"] == "Hello, you."
    assert [body.get("min_precision") for body in gateway.bodies] == [None, None, "int8", "int8"]


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_dumb_terminal_gets_no_sequences(gateway: ScriptedGateway, term: str) -> None:
    with terminal(words(gateway), environment(TERM=term)) as screen:
        screen.wait_for("> ")
        screen.type("Who?\n")
        screen.wait_for("Hello, you.")
        screen.wait_for("> ", count=2)
        screen.type(CTRL_D)
        assert screen.end() == 0
    assert "\x1b" not in screen.raw


def test_no_color_is_obeyed(gateway: ScriptedGateway) -> None:
    with terminal(words(gateway), environment(NO_COLOR="1")) as screen:
        screen.wait_for_prompt(1)
        screen.ask("/quit")
        assert screen.end() == 0
    assert "demo answers." in screen.text and DIM not in screen.raw


def test_the_answer_of_a_pipe_is_all_of_standard_output(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n"))
    assert main(["chat", "--url", gateway.url, "--system", "Be brief.", "--max-tokens", "5"]) == 0
    assert capsys.readouterr() == ("Hello, you.\n", "")
    assert gateway.bodies[-1] | {"messages": len(gateway.bodies[-1]["messages"])} == {
        "model": "demo",
        "messages": 2,
        "max_tokens": 5,
        "stream": True,
    }
    gateway.refusal = "no"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n"))
    assert main(["chat", "--url", gateway.url]) == 1
    assert capsys.readouterr() == ("", "instar chat: /v1/chat/completions: 400: no\n")


def test_flags_are_checked_before_a_question_is_read(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", gateway.url, "--model", "dmeo"]) == 2
    assert "--model dmeo: no such model is served; did you mean demo?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["chat", "--min-precision", "int88"])
    assert "did you mean int8?" in capsys.readouterr().err
