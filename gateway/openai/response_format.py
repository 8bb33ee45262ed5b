"""The answers of /v1/responses: an object, or the events of a stream, each with its number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.errors import ApiError
from gateway.openai.formats import AnswerHead, to_json
from gateway.openai.responses import ResponsesBody
from gateway.openai.tools.answer import AnswerForm
from gateway.openai.tools.call_reader import AnswerPart

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead(AnswerHead):
    """The fields that the answer and several events repeat. `format`: that of the chat beneath."""

    body: ResponsesBody

    def response(self, status: str, **changed: Any) -> JsonObject:
        """Return the object of an answer that is under way, with these fields changed."""
        body = self.body
        return {
            "id": self.id,
            "object": self.format.whole_object,
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "system_fingerprint": None,
            "temperature": body.temperature,
            "text": {"format": body.text_format.for_answer(), "verbosity": "medium"},
            "tool_choice": body.choice_for_answer,
            "tools": [tool.for_answer() for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
        } | changed

    def message(self, number: int) -> JsonObject:
        """Return an item of the output that has text. `number`: messages before it."""
        name = self.id.removeprefix(self.format.id_prefix) + (f"_{number}" if number else "")
        fields = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "in_progress"}
        return fields | {"content": []}

    def call(self, number: int, call_id: str, name: str) -> JsonObject:
        """Return an item of the output that calls a tool. `number`: calls before it."""
        item_id = f"fc_{self.id.removeprefix(self.format.id_prefix)}_{number}"
        fields = {"id": item_id, "type": "function_call", "status": "in_progress"}
        return fields | {"call_id": call_id, "name": name, "arguments": ""}


class ResponseWriter:
    """Puts an answer together as items, one after another, and writes the events of that in OpenAI's order.

    Where there are no tools the message is there from the start. With tools it begins with its first text, so
    an answer of calls alone has none.
    """

    def __init__(self, head: ResponseHead, form: AnswerForm | None = None) -> None:
        """form: how calls are told from content; None: all is content."""
        self._head, self._form = head, form
        self._num_events = 0
        self._items: list[JsonObject] = []
        self._open: Literal["message", "function_call", ""] = ""  # the type of the last item while it grows
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._scores: list[JsonObject] = []  # of the open message's tokens
        self._waiting: list[JsonObject] = []  # of tokens whose text is not out

    def opening(self) -> bytes:
        """Return the events before any output."""
        response = self._head.response("in_progress")
        created = self._event("response.created", response=response)
        begun = created + self._event("response.in_progress", response=response)
        return begun if self._form is not None else begun + self._begin_message()

    def take(self, parts: Iterable[AnswerPart], scores: Sequence[JsonObject] = ()) -> bytes:
        """Return the events of the next parts. `scores`: log-probabilities of their tokens."""
        self._waiting += scores
        events = [self._part(part) for part in parts]
        if self._waiting and self._open == "message":
            events.append(self._text(""))
        return b"".join(events)

    def close(self, finish_reason: str | None) -> bytes:
        """Return the events that end the last item."""
        begun = b"" if self._items else self._begin_message()
        return begun + self._end_item(_status(finish_reason))

    def end(
        self,
        finish_reason: str,
        usage: JsonObject,
        fingerprint: str,
        precision: list[JsonObject] | None = None,
    ) -> bytes:
        """Return the last events."""
        closed = self.close(finish_reason)
        response = self.ended(finish_reason, usage, fingerprint, precision)
        return closed + self._event(f"response.{response['status']}", response=response)

    def ended(
        self,
        finish_reason: str | None,
        usage: JsonObject,
        fingerprint: str,
        precision: list[JsonObject] | None,
    ) -> JsonObject:
        """Return the object of a whole answer, whose items are closed."""
        status = _status(finish_reason)
        return self._head.response(
            status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            output=self._items,
            system_fingerprint=fingerprint or None,
            usage=_usage(usage),
            **({} if precision is None else {"precision": precision}),
        )

    def failure(self, error: ApiError) -> bytes:
        """Return the events that end an answer in its middle: the error, and the answer so far.

        OpenAI has a closed list of codes for the second, so only the first has ours.
        """
        self._fill("incomplete")
        failed = self._head.response(
            "failed", error={"code": "server_error", "message": error.message}, output=self._items
        )
        said = self._event("error", code=error.code, message=error.message, param=error.param)
        return said + self._event("response.failed", response=failed)

    # ---------------------------------------------------------------- parts of the answer

    def _part(self, part: AnswerPart) -> bytes:
        if part.kind == "call":
            return self._begin_call(part.text)
        if part.kind == "arguments":
            self._pieces.append(part.text)
            return self._event("response.function_call_arguments.delta", **self._where, delta=part.text)
        return self._text(part.text)

    def _text(self, text: str) -> bytes:
        begun = b"" if self._open == "message" else self._begin_message()
        scores, self._waiting = self._waiting, []
        self._pieces.append(text)
        self._scores += scores
        where = self._where | {"content_index": 0}
        return begun + self._event("response.output_text.delta", **where, delta=text, logprobs=scores)

    # ---------------------------------------------------------------- items

    @property
    def _where(self) -> JsonObject:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _count(self, kind: str) -> int:
        return sum(item["type"] == kind for item in self._items)

    def _begin_message(self) -> bytes:
        begun = self._begin(self._head.message(self._count("message")))
        where = self._where | {"content_index": 0}
        return begun + self._event("response.content_part.added", **where, part=_part("", []))

    def _begin_call(self, name: str) -> bytes:
        assert self._form is not None  # without it nothing is a call
        return self._begin(self._head.call(self._count("function_call"), self._form.new_id(), name))

    def _begin(self, item: JsonObject) -> bytes:
        ended = self._end_item("completed")
        self._items.append(item)
        self._open = item["type"]
        return ended + self._of_item("response.output_item.added")

    def _end_item(self, status: str) -> bytes:
        """Return the events that end the open item; b"" if none is open."""
        kind = self._open
        self._fill(status)
        if kind == "message":
            where, (part,) = self._where | {"content_index": 0}, self._items[-1]["content"]
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            done = self._event("response.output_text.done", **where, **said)
            done += self._event("response.content_part.done", **where, part=part)
        elif kind == "function_call":
            said = {name: self._items[-1][name] for name in ("name", "arguments")}
            done = self._event("response.function_call_arguments.done", **self._where, **said)
        else:
            return b""
        return done + self._of_item("response.output_item.done")

    def _fill(self, status: str) -> None:
        """Close the open item, which gets its text or arguments."""
        text = "".join(self._pieces)
        if self._open == "message":
            self._items[-1] |= {"status": status, "content": [_part(text, self._scores)]}
        elif self._open == "function_call":
            self._items[-1] |= {"status": status, "arguments": text}
        self._open, self._scores = "", []
        self._pieces.clear()

    def _of_item(self, kind: str) -> bytes:
        return self._event(kind, output_index=len(self._items) - 1, item=self._items[-1])

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._num_events} | fields)
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _part(text: str, logprobs: list[JsonObject]) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: JsonObject) -> JsonObject:
    """Return the numbers of a chat under this API's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
