"""The meaning of a chat's tools for its prompt, for the form of its answer, and for how that is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from bus.messages import Grammar
from gateway.errors import invalid
from gateway.openai.params import ChatBody
from gateway.openai.structured import problem_of
from gateway.openai.tools.answer import AnswerForm
from gateway.openai.tools.declarations import FunctionTool, NamedTool
from gateway.openai.tools.forced import calls_grammar, parameters_grammar
from gateway.openai.tools.formats import FORCED, TOOL_FORMATS, ToolFormat, thought_of, tool_format_of
from gateway.text.template import ChatTemplate
from gateway.text.tokenizer import Tokenizer

Formats = Mapping[str, ToolFormat | None]  # of models for which the settings say it

_NO_FORMAT: Final = ToolFormat()


def formats_of(entries: Iterable[str]) -> Formats:
    """Return the formats of `gateway.tool_formats`, by model; None: the model calls no tools."""
    pairs = [entry.rpartition("=") for entry in entries]
    known = {str(name): form for name, form in TOOL_FORMATS.items()}
    return {model: known.get(name) for model, _, name in pairs}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools that a chat offers. `must_call`: the ones of which its answer calls one or more; or none."""

    offered: tuple[FunctionTool, ...]
    must_call: tuple[FunctionTool, ...]
    format: ToolFormat | None  # how the model calls tools by itself
    is_single: bool  # at most one call

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them; None for none."""
        return [tool.for_template() for tool in self.offered] or None

    async def grammar(self, end_token_ids: tuple[int, ...]) -> Grammar | None:
        """Return the form that the answer must have, which the model's own tokens end; None for any.

        Raises ApiError 400, which names the tool, for a schema that cannot be compiled.
        """
        if not self.must_call:
            return None
        grammar = calls_grammar(self.must_call, self.format or _NO_FORMAT, is_single=self.is_single)
        if why := await problem_of(grammar):
            raise invalid(*await self._blame(why))
        return replace(grammar, end_token_ids=end_token_ids)

    async def _blame(self, why: str) -> tuple[str, str]:
        """Return (message, the field at fault) for tools whose schemas cannot be compiled together."""
        for number, tool in enumerate(self.offered):
            if tool in self.must_call and (own := await problem_of(parameters_grammar(tool))):
                param = f"tools[{number}].function.parameters"
                return f"{param}: no call of {tool.function.name!r} can be forced: {own}", param
        return f"tools: no call of these tools can be forced: {why}", "tools"

    def answer_form(self, prompt: str, tokenizer: Tokenizer, *, has_grammar: bool) -> AnswerForm | None:
        """Return how to divide the answers to a prompt; None if they are content throughout.

        has_grammar: the answer has a form, so it begins with no thought.
        """
        template = tokenizer.template
        text = template.with_tools if self.offered else template.default
        thought = None if has_grammar else thought_of(text)
        form = FORCED if self.must_call else self.format if self.offered else None
        if form is None and thought is None:
            return None
        markers = (*(form.markers if form else ()), *(thought or ()))
        return AnswerForm(
            tools=form,
            names=frozenset(tool.function.name for tool in self.must_call or self.offered),
            thought=thought,
            is_thinking=thought is not None and prompt.rstrip().endswith(thought.begin),
            max_calls=1 if self.is_single else None,
            id_chars=(self.format or _NO_FORMAT).id_chars,
            markers=tokenizer.vocabulary.special_tokens(markers),
        )


def plan_of(body: ChatBody, template: ChatTemplate, formats: Formats) -> ToolPlan:
    """Return what a chat's tools mean for a model with this template. `formats`: those of the settings.

    Raises ApiError 400 for tools that the model is not told of, or whose calls nobody could read.
    """
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return ToolPlan((), (), None, is_single=False)
    text = template.with_tools
    if "tools" not in text:
        raise invalid(
            f"the chat template of {body.model!r} does not tell the model of tools; leave tools out",
            "tools",
            "tools_not_supported",
        )
    form = formats[body.model] if body.model in formats else tool_format_of(text)
    if form is None and choice == "auto":
        raise invalid(
            f"{body.model!r} calls tools in a way that is not known here; send tool_choice 'required' or the "
            "name of one, leave tools out, or let an operator set gateway.tool_formats",
            "tools",
            "tools_not_supported",
        )
    offered = tuple(body.tools)
    if isinstance(choice, NamedTool):
        named = tuple(tool for tool in offered if tool.function.name == choice.function.name)
        return ToolPlan(offered, named, form, is_single=True)
    is_single = not body.parallel_tool_calls
    return ToolPlan(offered, offered if choice == "required" else (), form, is_single=is_single)
