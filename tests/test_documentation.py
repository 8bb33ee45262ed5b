"""The documentation: its commands can be typed as they stand, and the first pages read easily."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from instar.cli import OFFLINE, parser_for
from instar.parser import parse
from tests.support.paths import ROOT

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FIRST_PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]
MOST_WORDS = 30  # of a sentence on these


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def typed(document: Path) -> Iterator[list[str]]:
    """Yield the words of each `instar` command in the blocks, without comments and what follows a pipe."""
    for language, block in blocks_of(document.read_text()):
        if language not in ("", "bash", "sh", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"^(?:\$ )?(?:[A-Z][A-Z_]*=\S+ )*(?:\.venv/bin/)?", "", line.strip())
            if not command.startswith("instar "):
                continue
            words = shlex.split(command, comments=True)
            ends = [i for i, word in enumerate(words) if word in ("|", ">", "<", "&&", "&", ";", "2>")]
            yield words[1 : ends[0]] if ends else words[1:]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_of_a_page_can_be_parsed(document: Path) -> None:
    for words in typed(document):
        if words[0] in OFFLINE:
            continue  # they have parsers of their own, where torch is
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                parse(parser_for(words[0]), words)
        except SystemExit as end:
            assert end.code == 0, f"instar {shlex.join(words)}: {said.getvalue()}"


def test_the_change_log_begins_with_the_version_that_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first and first[1] == declared


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_json_of_a_page_can_be_parsed(document: Path) -> None:
    for body in re.findall(r"-d '(\{.*?\})'", document.read_text(), re.DOTALL):
        if "..." not in body:  # what a reader fills in
            json.loads(body)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_anchors_of_a_page_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text())
    for link, anchor in links:
        if "://" not in link and (not link or link.endswith(".md")):
            path = document.parent / link if link else document
            assert anchor in anchors_of(path.read_text()), f"{link}#{anchor}"


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one).lower() for one in headings]
    return {re.sub(r"[^\w\- ]", "", one).strip().replace(" ", "-") for one in plain}


@pytest.mark.parametrize("document", FIRST_PAGES, ids=lambda path: path.name)
def test_the_first_pages_have_no_long_sentence(document: Path) -> None:
    long = [one for one in sentences_of(document.read_text()) if len(one.split()) > MOST_WORDS]
    assert long == []


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a page's prose: no blocks, tables, headings or markup."""
    no_prose = r"^```.*?^```$|^<!--.*?-->$|<picture>.*?</picture>|^\|[^\n]*$|^#[^\n]*$"
    text = re.sub(no_prose, "\n", text, flags=re.M | re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|^- ", text, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.:;!?])\s+", " ".join(paragraph.split()))


# ------------------------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_to_pages_of_the_site_and_others_become_text(site: ModuleType) -> None:
    text = "[a](docs/keys.md#scopes), [b](bench/LOG.md), [c](https://x.org/), [d](#here), ![e](bench/p.png)"
    found, pictures = site.rewritten(text, "README.md")
    assert found == "[a](keys.md#scopes), b, [c](https://x.org/), [d](#here), ![e](bench/p.png)"
    assert pictures == {"bench/p.png"}
    text = '[a](../README.md), ![b](images/c.png) <img src="images/c.png">'
    assert site.rewritten(text, "docs/x.md") == (text.replace("../README.md", "index.md"), set())


def test_the_site_has_every_page_and_every_setting(site: ModuleType) -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | {*site.OUTSIDE.values(), *site.GENERATED}
    assert {page for page in pages if f": {page}\n" not in nav} == set()
    assert "`gateway.port`" in site.settings_page() and "INSTAR_GATEWAY__PORT" in site.settings_page()
    assert "## instar morph swap" in site.commands_page() and "--precision" in site.commands_page()
