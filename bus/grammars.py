"""Grammars of structured output: what a client may ask for, as the library llguidance takes it.

The gateway refuses what cannot be compiled (`problem`), and a worker compiles the rest for its model's
tokens. Both are bounded by the library's own limits (`LLParserLimits`), which count work, not time: what
passes on one machine passes on all. What it follows by recursion ends the process where the stack ends, so
both compile in a thread of `compiling_thread`; `definition` bounds the text wherever it is called.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

from llguidance import LLMatcher, LLTokenizer, grammar_from

from bus.messages import Grammar

MAX_CHARS: Final = 65_536  # of a grammar's text
MAX_RULES: Final = 512  # of a grammar: 512 terminals of repetitions take 3.3 s, 1,832 more than a minute

# The deepest texts of MAX_CHARS, such as a schema of 124 others with 50 levels each, need between 16 and
# 32 MiB (llguidance 1.9.1). Only what is used is taken from the machine.
_STACK_BYTES: Final = 128 << 20

# JSON may have whitespace between its tokens, and a model that is unsure writes it without an end.
_WHITESPACE: Final = r"[ \n\r\t]{1,32}"


def definition(grammar: Grammar) -> str:
    """Return the grammar in llguidance's own form.

    Raises ValueError for a text that is none of its kind, and for one beyond the limits.
    """
    if why := excess(grammar):
        raise ValueError(why)
    if grammar.kind == "json_schema":
        options = {"whitespace_pattern": _WHITESPACE, "lenient": grammar.is_lenient}
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)  # type: ignore[arg-type]
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(grammar.text))))
    return grammar_from("grammar", grammar.text)


def excess(grammar: Grammar) -> str | None:
    """Return which limit a grammar exceeds, in one line; None if it keeps them."""
    text = grammar.text
    if len(text) > MAX_CHARS:
        return f"it has {len(text)} characters; at most {MAX_CHARS} are allowed"
    num_rules = text.replace("::=", ":").count(":")  # each has one; those in texts count, too
    if grammar.kind == "grammar" and num_rules > MAX_RULES:
        return f"it has {num_rules} rules; at most {MAX_RULES} are allowed"
    return None


def compiling_thread(name: str) -> ThreadPoolExecutor:
    """Return a thread to compile in (`problem`, `definition`): its stack holds the deepest texts."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, name)
        pool.submit(int)  # a pool starts its thread with the first task
        return pool
    finally:
        threading.stack_size(before)


def problem(grammar: Grammar) -> str | None:
    """Return why no answer can have this form, or why it cannot be compiled, in one line; None if it can."""
    try:
        matcher = LLMatcher(_bytes(), definition(grammar), log_level=0)
    except ValueError as error:
        return _one_line(str(error))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return None
    why = error_of(matcher)
    return "no text has this form" if why.startswith("NoExtension") else why


def error_of(matcher: LLMatcher) -> str:
    """Return why a matcher cannot go on, in one line."""
    return _one_line(matcher.get_error())


@cache
def _bytes() -> LLTokenizer:
    """Return a tokenizer whose tokens are the bytes: enough to see that a grammar is sound."""
    return LLTokenizer("byte")


def _literal(text: str) -> str:
    """Return a regular expression of this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _one_line(text: str) -> str:
    """Return the line that says what is wrong; the library quotes the text around it, and adds its state."""
    lines = [line.strip() for line in text.partition("<state>")[0].splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join(told or lines[:1])[:300].rstrip(":") or "it cannot be compiled"
