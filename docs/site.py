"""Hooks of MkDocs: README.md and CONTRIBUTING.md as pages, reference pages from the code, and their links.

Links of the repository's documents are relative to their files. On the site a link to another document leads
to its page, a picture is copied, and a link to any other file becomes its text.
"""

from __future__ import annotations

import argparse
import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
OUTSIDE: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}  # documents not in docs/
PICTURES: Final = (".png", ".svg")
_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_SOURCE: Final = re.compile(r'((?:src|srcset)=")([^":]+)(")')


def page_of(path: str) -> str:
    """Return the page of a document of the repository, "" for another file."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    inside = path.startswith("docs/") and path.endswith(".md")
    return path.removeprefix("docs/") if inside else ""


def rewritten(text: str, document: str) -> tuple[str, set[str]]:
    """Return a document's text for the site, and the pictures outside of docs/ that it shows."""
    folder, pictures = posixpath.dirname(document), set[str]()

    def target(link: str) -> str:
        path = posixpath.normpath(posixpath.join(folder, link))
        if not path.endswith(PICTURES):
            return page_of(path)
        if not path.startswith("docs/"):
            pictures.add(path)
        return path.removeprefix("docs/")

    def linked(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:") or not path:
            return match[0]
        found = target(path)
        return f"{mark}[{label}]({found}{'#' + anchor if anchor else ''})" if found else label

    text = _LINK.sub(linked, text)
    return _SOURCE.sub(lambda match: f"{match[1]}{target(match[2])}{match[3]}", text), pictures


# ------------------------------------------------------------------------------------- generated pages


def commands_page() -> str:
    """Return the help of every command."""
    from instar.cli import parser_for

    parts = ["# Every command\n\nThe help of each command, as `instar COMMAND --help` prints it.\n"]
    for name, parser in _leaves(parser_for("--help-of-all")):
        parts.append(f"\n## {name}\n\n```text\n{parser.format_help().rstrip()}\n```\n")
    return "".join(parts)


def _leaves(parser: Any) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for command in parser.commands.values():
        yield from _leaves(command)


def settings_page() -> str:
    """Return a table of every setting, a section each."""
    from bus.settings import Settings
    from bus.settings_sources import variable_of
    from instar.commands.settings import limits_of

    parts = ["# Every setting\n\n[Settings](../commands.md#settings) says where they are set.\n"]
    for section, holder in Settings.model_fields.items():
        model: Any = holder.annotation
        about = (model.__doc__ or "").strip().partition("\n")[0]
        parts.append(f"\n## {section}\n\n{about}\n\n| setting | default | meaning |\n| --- | --- | --- |\n")
        for key, field in model.model_fields.items():
            default = json.dumps(field.get_default(call_default_factory=True))
            note = html.escape(", ".join(filter(None, (field.description, limits_of(field)))))
            name = f"{section}.{key}"
            cells = (f"`{name}`<br>`{variable_of(name)}`", f"`{default}`", note)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


GENERATED: Final = {"reference/commands.md": commands_page, "reference/settings.md": settings_page}


# ------------------------------------------------------------------------------------- hooks


def on_files(files: Any, config: Any) -> Any:
    """Add the documents and pictures outside of docs/, and the generated pages."""
    from mkdocs.structure.files import File

    documents = [*OUTSIDE, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
    pictures: set[str] = set()
    for document in documents:
        text, found = rewritten((ROOT / document).read_text(), document)
        pictures |= found
        if document in OUTSIDE:
            files.append(File.generated(config, OUTSIDE[document], content=text))
    for picture in sorted(pictures):
        files.append(File.generated(config, picture, content=(ROOT / picture).read_bytes()))
    for name, written in GENERATED.items():
        files.append(File.generated(config, name, content=written()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a document in docs/; those outside are rewritten when they are added."""
    name = page.file.src_uri
    if name in GENERATED or name in OUTSIDE.values():
        return markdown
    return rewritten(markdown, f"docs/{name}")[0]
