"""Limits of grammars: what the library follows by recursion must not end a process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bus.grammars import MAX_CHARS, MAX_RULES, definition, excess, problem
from bus.messages import Grammar, GrammarKind
from tests.support.paths import ROOT


def rules(num: int) -> str:
    """Rules of which each is the next."""
    return "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(num - 2)), f'a{num - 2}: "x"'])


def references(num: int, before: str, after: str) -> str:
    """A schema of `num` others, of which each has the next within 20 levels."""
    others = (f'"d{i}":{before * 20}{{"$ref":"#/$defs/d{i + 1}"}}{after * 20}' for i in range(num - 1))
    return f'{{"$defs":{{{",".join(others)},"d{num - 1}":{{"const":1}}}},"$ref":"#/$defs/d0"}}'


def brackets(begin: str, end: str) -> str:
    num = (MAX_CHARS - 20) // (len(begin) + len(end))
    return f'start: {begin * num}"x"{end * num}'


DEEP: list[tuple[GrammarKind, str]] = [
    ("json_schema", references(2000, "", "")),
    ("json_schema", references(280, '{"items":', "}")),
    ("json_schema", references(140, '{"properties":{"a":', "}}")),
    ("json_schema", references(160, '{"prefixItems":[', "]}")),
    ("json_schema", references(120, '{"additionalProperties":', "}")),
    ("json_schema", references(240, '{"allOf":[', "]}")),
    ("json_schema", references(240, '{"anyOf":[', "]}")),
    ("json_schema", '{"items":' * 6500 + "{}" + "}" * 6500),
    ("grammar", rules(MAX_RULES)),
    ("grammar", rules(MAX_RULES).replace("start", "root").replace(":", " ::=")),
    ("grammar", brackets("(", ")")),
    ("grammar", brackets("[", "]")),
    ("grammar", brackets("a{", "}")),  # of a template
    ("grammar", f"start::_ : x %if {'not(' * 9000}true{')' * 9000}"),  # a condition of parameters
    ("regex", "(" * 249 + "a" + ")" * 249),
    ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    ("regex", "a|" * 30_000 + "b"),
    ("choice", json.dumps([f"choice {i}" for i in range(1024)])),
    ("grammar", "start: " + " ".join(['"x"'] * 10_000)),
]


def test_the_deepest_texts_get_an_answer_from_a_process_that_goes_on() -> None:
    """An answer comes, compiled or not. Most of the schemas end a process in a thread of 8 MiB."""
    assert not any(excess(Grammar(kind=kind, text=text)) for kind, text in DEEP)
    code = (
        "import json, sys\n"
        "from bus.grammars import compiling_thread, problem\n"
        "from bus.messages import Grammar\n"
        "thread = compiling_thread('grammars')\n"
        "for turn, (kind, text) in enumerate(json.load(sys.stdin)):\n"
        "    thread.submit(problem, Grammar(kind=kind, text=text)).result()\n"
        "    print(turn, flush=True)\n"
    )
    command, given = [sys.executable, "-c", code], json.dumps(DEEP)
    done = subprocess.run(
        command, input=given, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    answered = [f"{turn}" for turn in range(len(DEEP))]
    assert (done.returncode, done.stdout.splitlines()) == (0, answered), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("grammar", rules(MAX_RULES + 1), f"it has {MAX_RULES + 1} rules; at most {MAX_RULES} are allowed"),
        (
            "regex",
            "a" * (MAX_CHARS + 1),
            f"it has {MAX_CHARS + 1} characters; at most {MAX_CHARS} are allowed",
        ),
    ],
)
def test_what_is_beyond_a_limit_is_refused_wherever_it_is_compiled(
    kind: GrammarKind, text: str, why: str
) -> None:
    grammar = Grammar(kind=kind, text=text)
    assert (problem(grammar) or "").startswith(why)
    with pytest.raises(ValueError, match=why):
        definition(grammar)


def test_what_is_no_schema_is_refused() -> None:
    for bad in ("{", "[" * 5000, "", "nothing"):  # the library says why
        assert problem(Grammar(kind="json_schema", text=bad))
