"""/tokenize and /detokenize, as vLLM has them: a text or a conversation to token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import FailFast, Field
from starlette.responses import Response

from gateway.errors import invalid
from gateway.openai.intake import check_ids, refuse_if_long
from gateway.openai.params import MAX_MESSAGES, Body, Message, TokenId
from gateway.operations import orders
from gateway.operations.answers import Here, body_of, json_answer
from gateway.operations.public import with_key

MAX_TOKENS: Final = 1 << 20  # ids of one call

router = APIRouter(dependencies=[Depends(with_key)])

Name = Annotated[str, Field(min_length=1)]


class TokenizeBody(Body):
    """The body of POST /tokenize: a prompt, or the messages of a chat."""

    model: Name
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True  # of a prompt; a chat's template writes its own
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: Name
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS), FailFast()]


@router.post("/tokenize")
async def tokenize(request: Request, gateway: Here) -> Response:
    """Answer the tokens of a text as the model gets them. 400 for one that is longer than its context."""
    body = orders.parse(TokenizeBody, await body_of(request, gateway))
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


@router.post("/detokenize")
async def detokenize(request: Request, gateway: Here) -> Response:
    """Answer the text of token ids, special tokens left out. 400 for one outside the vocabulary."""
    body = orders.parse(DetokenizeBody, await body_of(request, gateway))
    card = gateway.models.card(body.model)
    tokenizer = await gateway.models.tokenizer(card)
    check_ids(body.tokens, card, "tokens")
    return json_answer({"prompt": tokenizer.vocabulary.text_of(body.tokens)})
