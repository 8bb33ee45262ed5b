"""Typed answers and tools for all clients, of so few values that a small model ends each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "demo"
QUESTION = "How warm is it in Rome?"
MAX_TOKENS = 300  # of typed answers: more than any of them has
# Fields that clients pass on as they are: an answer in text ends after four tokens, where a small model would
# go on for long and clients take what is cut for an error. 5 is the token that ends a turn.
SHORT: Any = {"logit_bias": {"5": 100}, "min_tokens": 4}


class Light(BaseModel):
    """Set a lamp."""

    model_config = ConfigDict(extra="forbid")

    room: Literal["kitchen", "hall"]
    level: Annotated[int, Field(ge=0, le=9)]


class Weather(BaseModel):
    """Look up how warm a city is."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]


class AnyObject(BaseModel):
    """A JSON object of any fields, since a small model does not follow instructions."""

    model_config = ConfigDict(extra="allow")


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Look up how warm a city is."""
    return {"Rome": "31 degrees", "Oslo": "12 degrees"}[city]
