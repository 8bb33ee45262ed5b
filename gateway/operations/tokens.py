"""/tokenize and /detokenize, as vLLM has them: a text or a conversation to token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from pydantic import ConfigDict, FailFast, Field
from starlette.responses import Response

from gateway.errors import invalid
from gateway.openai.answer_types import DetokenizeAnswer, TokenizeAnswer
from gateway.openai.fields import Body, OnlyTrue, TokenId
from gateway.openai.intake import check_ids, refuse_if_long
from gateway.openai.messages import MAX_MESSAGES, Message
from gateway.operations.answers import Here, json_answer
from gateway.operations.inputs import BodyOf, answering
from gateway.operations.public import with_key

MAX_TOKENS: Final = 1 << 20  # ids of one call

router = APIRouter(dependencies=[Depends(with_key)])

Name = Annotated[str, Field(min_length=1, examples=["demo"])]


def _only(name: str, kind: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": kind}}}


class TokenizeBody(Body):
    """The body of POST /tokenize: a prompt, or the messages of a chat."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [_only("prompt", "string"), _only("messages", "array")]}
    )

    model: Name
    """The name of a served model."""
    prompt: str | None = None
    """A text."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """A conversation, which the model's chat template makes a text of."""
    add_special_tokens: bool = True
    """Of a prompt; a chat's template writes its own."""
    add_generation_prompt: OnlyTrue = True
    """The template's beginning of an answer comes last, as the model gets it."""
    return_token_strs: bool = False
    """Answer each token's text, too."""


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: Name
    """The name of a served model."""
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS), FailFast()]
    """Token ids, each below the size of the model's vocabulary."""


@router.post("/tokenize", responses=answering(TokenizeAnswer, 404))
async def tokenize(gateway: Here, body: Annotated[TokenizeBody, Depends(BodyOf(TokenizeBody))]) -> Response:
    """Answer the tokens of a text as the model gets them. 400 for one that is longer than its context."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send either prompt or messages", "prompt")
    card = gateway.models.card(body.model)
    context = gateway.request_builder.context(card)
    tokenizer = await gateway.models.tokenizer(card)
    if body.messages is None:
        text, special_tokens = body.prompt or "", body.add_special_tokens
    else:
        messages = [message.for_template() for message in body.messages]
        refuse_if_long(sum(len(message["content"]) for message in messages), context, tokenizer)
        text, special_tokens = await tokenizer.chat_text(messages), False
    refuse_if_long(len(text), context, tokenizer)
    token_ids = await tokenizer.encode(text, special_tokens=special_tokens)
    label = tokenizer.vocabulary.label
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": context, "tokens": token_ids}
    return json_answer(
        answer | {"token_strs": list(map(label, token_ids)) if body.return_token_strs else None}
    )


@router.post("/detokenize", responses=answering(DetokenizeAnswer, 404))
async def detokenize(
    gateway: Here, body: Annotated[DetokenizeBody, Depends(BodyOf(DetokenizeBody))]
) -> Response:
    """Answer the text of token ids, special tokens left out. 400 for one outside the vocabulary."""
    card = gateway.models.card(body.model)
    tokenizer = await gateway.models.tokenizer(card)
    check_ids(body.tokens, card, "tokens")
    return json_answer({"prompt": tokenizer.vocabulary.text_of(body.tokens)})
