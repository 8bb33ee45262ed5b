"""A model's chat template: the text of a conversation in the format that the model was trained on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from gateway.errors import invalid

_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
WITH_TOOLS: Final = "tool_use"  # the name of a folder's template for requests with tools, if it has one

Messages = list[dict[str, Any]]


class ChatTemplate:
    """The templates of a folder: `default`, and one for requests with tools, often the same."""

    def __init__(self, default: str, with_tools: str | None, config: dict[str, Any]) -> None:
        """config: the tokenizer's, which names its special tokens."""
        self.default, self.with_tools = default, with_tools or default
        self._special = {name: text for name in _SPECIAL if (text := content_of(config.get(name)))}

    def render(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> str:
        """Return the text, up to where the answer begins. Raises ApiError 400 for what the template refuses.

        messages: those of a request, with arguments of calls as objects. tools: as OpenAI's API has them.
        """
        return _render(self.with_tools if tools else self.default, messages, tools, self._special)


def read_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    """Return the template of its own file or of the tokenizer's config: one text, or several by name."""
    given = config.get("chat_template")
    by_name: dict[str, Any] = {"default": given}
    if isinstance(given, list):
        by_name = {entry["name"]: entry["template"] for entry in given}
    for name, file in (
        ("default", folder / "chat_template.jinja"),
        (WITH_TOOLS, folder / "additional_chat_templates" / f"{WITH_TOOLS}.jinja"),
    ):
        if file.is_file():
            by_name[name] = file.read_text(encoding="utf-8")
    default, with_tools = by_name.get("default"), by_name.get(WITH_TOOLS)
    if not isinstance(default, str):
        return None
    return ChatTemplate(default, with_tools if isinstance(with_tools, str) else None, config)


def content_of(token: Any) -> str | None:
    """Return the text of a special token, which is a text or {"content": text, ...}."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _render(
    template: str, messages: Messages, tools: list[dict[str, Any]] | None, special: dict[str, str]
) -> str:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            [messages], tools=tools or None, chat_template=template, add_generation_prompt=True, **special
        )
    except (TemplateError, TypeError, ValueError) as error:
        # On what the model was not trained on, as two user turns in a row.
        message = f"the model's chat template refuses these messages: {error}"
        raise invalid(message, "messages", "chat_template") from error
    return str(rendered[0])


def warm_up() -> None:
    """Import what the first chat would wait for (0.7 s)."""
    _render("{{ messages[0].content }}", [{"role": "user", "content": ""}], None, {})
