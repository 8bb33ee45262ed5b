"""The tools that a body offers, and its choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError

from gateway.errors import invalid
from gateway.openai.fields import Body, JsonSchema
from gateway.openai.problems import shown
from gateway.openai.tools.schemas import schema_problem

MAX_TOOLS = 128


def _as_schema(value: Any) -> Any:
    if problem := schema_problem(value):
        raise PydanticCustomError("parameters", "{problem}", {"problem": problem})
    return value


ToolName = Annotated[
    str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$", examples=["get_weather"])
]
Parameters = Annotated[JsonSchema, BeforeValidator(_as_schema)]


class FunctionSpec(Body):
    """A function that the model may call."""

    name: ToolName
    """Letters, digits, `_`, `.` and `-`; each name only once."""
    description: str | None = None
    """What it does, for the model."""
    parameters: Parameters | None = None
    """A JSON schema of its arguments, of the type object; left out: it takes none."""
    strict: bool | None = None
    """Where a call is forced, refuse keywords of the schema that are not supported; else they are ignored."""


class FunctionTool(Body):
    type: Literal["function"]
    """The only kind of tool."""
    function: FunctionSpec
    """The function itself."""

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates take, who read every field without asking for it."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class NamedFunction(Body):
    name: str
    """The name of one of the tools."""


class NamedTool(Body):
    """The choice of one tool, which the model then calls."""

    type: Literal["function"]
    """The only kind of tool."""
    function: NamedFunction
    """The function to call."""


def refuse_namesakes(names: Sequence[str]) -> None:
    """Raise PydanticCustomError for a name that two tools have."""
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise PydanticCustomError("names", "two tools have the name {name}", {"name": repr(twice)})


def _named_once(tools: list[FunctionTool]) -> list[FunctionTool]:
    refuse_namesakes([tool.function.name for tool in tools])
    return tools


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FailFast(), AfterValidator(_named_once)]
# The tags are no part of an error's path (`gateway.openai.problems`).
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedTool, Tag("[named]")],
    Discriminator(lambda value: "str" if isinstance(value, str) else "[named]"),
]


def check_choice(choice: ToolChoice, names: Sequence[str], where: str) -> None:
    """Refuse the choice of a tool that there is not. `where`: the path of its name. Raises ApiError 400."""
    if not names and (choice == "required" or isinstance(choice, NamedTool)):
        raise invalid(
            "tool_choice asks for a call, and there are no tools to call; send tools", "tool_choice"
        )
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        known = ", ".join(names)[:500]
        message = f"{where} is {shown(choice.function.name)}; the tools are {known}"
        raise invalid(message, where)
