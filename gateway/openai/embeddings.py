"""/v1/embeddings: the body, and the answer from what the workers made of its prompts."""

from __future__ import annotations

import struct
from base64 import b64encode
from typing import Annotated, Any, ClassVar, Final, Literal

from bus.messages import Delta, StepOutput
from gateway.delivery.request import GenerationRequest
from gateway.errors import engine_error
from gateway.openai.call import WholeCompletion
from gateway.openai.fields import DescribedAs
from gateway.openai.formats import to_json
from gateway.openai.params import CompletionBody, Prompts, ServedBody

Encoding = Literal["float", "base64"]

FLOAT_BYTES: Final = 4


class EmbeddingsBody(ServedBody):
    """The body of /v1/embeddings."""

    # Fields of a completion by their names here, for errors that its own checks find.
    NAMES: ClassVar[dict[str, str]] = {"prompt": "input", "max_tokens": "input"}

    input: Annotated[Any, DescribedAs(Prompts)]  # `parsing.prompts` checks it
    """A text, token ids, or a list of either."""
    encoding_format: Encoding = "float"
    """The form of an embedding: a list of numbers, or their float32 bytes, little-endian, in base64."""

    def as_call(self) -> CompletionBody:
        """Return the completion whose prompts are to be embedded. Its one token is never made."""
        shared = {name: getattr(self, name) for name in ServedBody.model_fields}
        return CompletionBody.model_construct(  # every field was validated
            **shared, prompt=self.input, max_tokens=1, temperature=0.0, seed=0
        )


class EmbeddingsCall(WholeCompletion):
    """The embeddings of a call's prompts."""

    def __init__(self, encoding: Encoding, *args: Any) -> None:
        super().__init__(*args)
        self._encoding = encoding
        self._made: list[bytes] = [b""] * len(self.choices)

    def on_tokens(self, request: GenerationRequest, delta: Delta, skip: int, step: StepOutput | None) -> bool:
        if delta.embedding is not None:
            self._made[request.index] = delta.embedding
        return super().on_tokens(request, delta, skip, step)

    def answer(self) -> bytes:
        """Return the JSON. Raises ApiError 500 if a worker of an earlier release made tokens instead."""
        if not all(self._made):
            raise engine_error("a worker made no embedding: its release does not know them")
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(made)}
            for index, made in enumerate(self._made)
        ]
        return to_json(
            {
                "object": self.envelope.format.whole_object,
                "data": data,
                "model": self.envelope.model,
                "system_fingerprint": self.fingerprint or None,
                "usage": {"prompt_tokens": self.num_prompt_tokens, "total_tokens": self.num_prompt_tokens},
            }
        )

    def _encoded(self, made: bytes) -> str | tuple[float, ...]:
        if self._encoding == "base64":
            return b64encode(made).decode()
        return struct.unpack(f"<{len(made) // FLOAT_BYTES}f", made)
