"""How model families write calls of tools and thoughts, and how their chat templates are told apart.

Read off the templates of the families' checkpoints. Not here: GPT-OSS's harmony, and calls in XML
(Qwen3-Coder, GLM), whose templates are none of these families'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from bus.settings import ToolFormatName

ARGUMENTS: Final = ("arguments", "parameters")  # either names the arguments in a call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How calls stand in a text: each a JSON object with a name and arguments.

    `hints`: a chat template that holds one of them, and none of `foreign`, is of this family.
    """

    hints: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    begin: str = ""  # before the calls; "": they have no marker
    end: str = ""  # after each call
    inner: tuple[str, ...] = ()  # markers inside a call
    opens: str = ""  # an answer that begins with this character may begin with a call, without `begin`
    separator: str = ""  # may stand between two calls
    has_lists: bool = False  # several calls may be one JSON list
    has_names: bool = False  # a call may be its name, then its arguments
    arguments: str = "arguments"  # their key, where a grammar makes the model write a call
    id_chars: int = 24  # of a call's id, which the template may check; 9: and no prefix

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, *self.inner)))


# The first that fits a template is its family.
TOOL_FORMATS: Final[dict[ToolFormatName, ToolFormat]] = {
    # Hermes 2 and 3, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated.
    "hermes": ToolFormat(
        hints=("<tool_call>",),
        foreign=("<function=", "<arg_key>"),
        begin="<tool_call>",
        end="</tool_call>",
    ),
    # Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]; since 2025 [TOOL_CALLS]name[ARGS]{...},
    # repeated. Older templates refuse ids that are not 9 letters and digits.
    "mistral": ToolFormat(
        hints=("[TOOL_CALLS]",),
        begin="[TOOL_CALLS]",
        inner=("[ARGS]", "[CALL_ID]"),
        has_lists=True,
        has_names=True,
        id_chars=9,
    ),
    # Llama 3.1 to 3.3: the answer is {"name": ..., "parameters": {...}}, after <|python_tag|> or alone.
    "llama3": ToolFormat(
        hints=("<|python_tag|>", '"parameters": dictionary of argument name and its value'),
        begin="<|python_tag|>",
        opens="{",
        separator=";",
        arguments="parameters",
    ),
}

# The text of an answer that a grammar holds to calls (`gateway.openai.tools.forced`): one JSON list.
FORCED: Final = ToolFormat(opens="[", has_lists=True)


class Thought(NamedTuple):
    """The markers around what a model thinks before it answers."""

    begin: str
    end: str


THOUGHTS: Final = (Thought("<think>", "</think>"), Thought("[THINK]", "[/THINK]"))


def tool_format_of(template: str) -> ToolFormat | None:
    """Return how a model with this chat template calls tools; None if it is no known way."""
    for form in TOOL_FORMATS.values():
        if any(hint in template for hint in form.hints) and not any(one in template for one in form.foreign):
            return form
    return None


def thought_of(template: str) -> Thought | None:
    """Return the markers of thoughts that this chat template knows; None without."""
    return next((one for one in THOUGHTS if one.end in template), None)
