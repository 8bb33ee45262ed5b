"""The answers of /v1/responses: an object, or the events of a stream, each with its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.errors import ApiError
from gateway.openai.formats import AnswerHead, to_json
from gateway.openai.responses import ResponsesBody

JsonObject = dict[str, Any]

_PLACE: Final = {"output_index": 0, "content_index": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead(AnswerHead):
    """The fields that the answer and several events repeat. `format`: that of the chat beneath."""

    body: ResponsesBody

    @property
    def message_id(self) -> str:
        return "msg_" + self.id.removeprefix(self.format.id_prefix)

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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "system_fingerprint": None,
            "temperature": body.temperature,
            "text": {"format": body.text_format.for_answer(), "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
        } | changed

    def message(self, status: str, *content: JsonObject) -> JsonObject:
        """Return the one item of the output."""
        fields = {"id": self.message_id, "type": "message", "role": "assistant", "status": status}
        return fields | {"content": list(content)}

    def ended(
        self,
        part: JsonObject,
        finish_reason: str | None,
        usage: JsonObject,
        fingerprint: str,
        precision: list[JsonObject] | None,
    ) -> JsonObject:
        """Return the object of a whole answer. `part`: its text."""
        is_cut = finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return self.response(
            status,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=[self.message(status, part)],
            system_fingerprint=fingerprint or None,
            usage=_usage(usage),
            **({} if precision is None else {"precision": precision}),
        )

    def whole(self, choices: list[JsonObject], usage: JsonObject, fingerprint: str) -> bytes:
        """Return the answer from that of a chat with one choice."""
        (choice,) = choices
        logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
        part = _part(choice["message"]["content"], logprobs)
        return to_json(self.ended(part, choice["finish_reason"], usage, fingerprint, choice.get("precision")))


class ResponseWriter:
    """Writes the events of one answer, in OpenAI's order."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._num_events = 0
        self._texts: list[str] = []
        self._logprobs: list[JsonObject] = []
        self._where = {"item_id": head.message_id} | _PLACE

    def opening(self) -> bytes:
        """Return the events before any text."""
        response = self._head.response("in_progress")
        item = self._head.message("in_progress")
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._where, part=_part("", [])),
            )
        )

    def text(self, text: str, logprobs: Sequence[JsonObject] = ()) -> bytes:
        """Return the event of a piece of text."""
        self._texts.append(text)
        self._logprobs += logprobs
        return self._event("response.output_text.delta", **self._where, delta=text, logprobs=logprobs)

    def end(
        self,
        finish_reason: str,
        usage: JsonObject,
        fingerprint: str,
        precision: list[JsonObject] | None = None,
    ) -> bytes:
        """Return the last events."""
        part = self._said()
        response = self._head.ended(part, finish_reason, usage, fingerprint, precision)
        (item,) = response["output"]
        return b"".join(
            (
                self._event(
                    "response.output_text.done", **self._where, text=part["text"], logprobs=part["logprobs"]
                ),
                self._event("response.content_part.done", **self._where, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def failure(self, error: ApiError) -> bytes:
        """Return the events that end an answer in its middle: the error, and the answer so far.

        OpenAI has a closed list of codes for the second, so only the first has ours.
        """
        failed = self._head.response(
            "failed",
            error={"code": "server_error", "message": error.message},
            output=[self._head.message("incomplete", self._said())],
        )
        said = self._event("error", code=error.code, message=error.message, param=error.param)
        return said + self._event("response.failed", response=failed)

    def _said(self) -> JsonObject:
        return _part("".join(self._texts), self._logprobs)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._num_events} | fields)
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


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
