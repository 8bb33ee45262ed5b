"""A tiny model that calls tools and thinks, by its chat template and its special tokens."""

from __future__ import annotations

from pathlib import Path

from tests.support import tiny_model

MARKERS = ("<tool_call>", "</tool_call>", "</think>")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} {% endif %}"
    "{% for m in messages %}[{{ m.role }}{{ m.tool_call_id }}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}"  # a newline after a block is left out
    "{% endfor %}[assistant]{% if thinks %}<think></think>{% endif %}"
)
THINKING = TEMPLATE.replace("{% if thinks %}<think></think>{% endif %}", "<think>\n{# </think> #}")


def write(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a model whose markers are special tokens, which have no text in other answers."""
    tiny_model.byte_level(folder, chat_template=template, special=MARKERS)
    return folder
