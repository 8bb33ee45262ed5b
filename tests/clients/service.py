"""The service that clients ask: the demo model with a chat template that tells it of tools.

It runs as a process of its own in the environment of the product, since the clients' packages are in another.
It writes its address to standard output, and ends when standard input does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from bench.common.service import Service
from tests.support.paths import DEMO_MODEL

# In the form of the Hermes models, from which the format of calls is told.
TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{{ tools | tojson }}"
    "<tool_call>{'name': ..., 'arguments': {...}}</tool_call><|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "demo"
        folder.mkdir()
        for path in DEMO_MODEL.iterdir():
            (folder / path.name).symlink_to(path)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        with Service(model=folder, settings={"WORKER__DTYPE": "float32"}) as service:
            sys.stdout.write(f"{service.url()}\n")
            sys.stdout.flush()
            sys.stdin.read()


if __name__ == "__main__":
    main()
