"""Chat examples made from the training files, so that the role tokens mean something to the model.

A documented function becomes: the user asks for it in the docstring's first line, the assistant answers
with its source. Nothing here is invented text, and held-out files are never read.
"""

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterator

from recipe.corpus import SourceFile
from recipe.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER

MAX_CODE_LINES = 40
SYSTEM_PROMPT = "You write Python."
REQUESTS = (
    "Write a Python function `{name}`: {purpose}",
    "Write `{name}`. {purpose}",
    "{purpose}",
)


def chat_examples(files: list[SourceFile], max_bytes: int) -> list[str]:
    """Render conversations from `files`, in an order fixed by their content, at most `max_bytes` in all."""
    rendered = (_rendered(node, text) for text, node in _documented_functions(files))
    chosen, used = [], 0
    for example in sorted(rendered, key=_digest):
        used += len(example.encode())
        if used > max_bytes:
            break
        chosen.append(example)
    return chosen


def _documented_functions(files: list[SourceFile]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in files:
        tree = _parsed(file.text)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                source = _source(file.text, node)
                if source.count("\n") < MAX_CODE_LINES:
                    yield source, node


def _rendered(node: ast.FunctionDef, source: str) -> str:
    """One conversation; whether it has a system message and how it asks follow from the source's digest."""
    purpose = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
    digest = _digest(source)
    request = REQUESTS[digest[0] % len(REQUESTS)].format(name=node.name, purpose=purpose)
    system = f"{SYSTEM}{SYSTEM_PROMPT}{END}" if digest[1] % 2 else ""
    return f"{BOS}{system}{USER}{request}{END}{ASSISTANT}{source}{END}"


def _source(text: str, node: ast.FunctionDef) -> str:
    lines = text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines)).rstrip("\n")


def _parsed(text: str) -> ast.Module | None:
    """Parse a file; None for one that does not parse, as some of the library's own tests do not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
