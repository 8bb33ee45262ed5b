"""The card of a run, and the table that compares several."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from instar.output.tables import ABSENT, make_table
from instar.replay.files import RunFile
from instar.replay.statistics import LATE_S, share_at_full

LATENCIES: Final = {"TTFT": "ttft_s", "TPOT": "tpot_s", "E2E": "e2e_s", "queue": "queue_s"}
COLUMNS: Final = ("mean", "p50", "p95", "p99")
_PRECISION: Final = re.compile(r'^instar_generation_tokens_by_precision_total\{.*precision="([^"]*)"')


def card(run: RunFile) -> RenderableType:
    """Return the results of a run on one screen."""
    found = run.summary
    lines = Table.grid(padding=(0, 2))
    for name, text in _lines(run, found):
        lines.add_row(name, Text(text))
    about = run.about
    heading = f"{about['source']} against {about['url']} ({about['model']}), {found['seconds']:.1f} s"
    return Group(Text(heading, style="bold"), _latencies(found), lines)


def _latencies(found: dict[str, Any]) -> Table:
    table = make_table([""], [f"{name}\ns" for name in COLUMNS])
    for name, key in LATENCIES.items():
        if found[key] is not None:
            table.add_row(name, *(seconds_text(found[key][column]) for column in COLUMNS))
    return table


def _lines(run: RunFile, found: dict[str, Any]) -> list[tuple[str, str]]:
    slo, good, through = run.slo, found["goodput"], found["throughput"]
    bad = {kind: f"{one['count']} ({one['share']:.1%})" for kind, one in found["violations"].items()}
    short = f", {found['short']} with fewer tokens than asked for" if found["short"] else ""
    lines = [
        ("requests", f"{found['requests']} sent, {found['served']} served{short}"),
        (
            "violations",
            f"{bad['ttft']} of TTFT {slo.ttft_s:g} s, {bad['tpot']} of TPOT {slo.tpot_s:g} s, "
            f"{bad['either']} of either; a failed request violates both",
        ),
        (
            "goodput",
            f"{good['requests_per_s']:.2f} requests/s, {good['tokens_per_s']:.1f} output tokens/s, "
            "of requests within both",
        ),
        (
            "throughput",
            f"{through['requests_per_s']:.2f} requests/s, {through['prompt_tokens_per_s']:.1f} prompt and "
            f"{through['output_tokens_per_s']:.1f} output tokens/s",
        ),
        ("errors", errors_text(found["errors"])),
        *(("", f"{kind}: {said}") for kind, said in run.said.items()),
        ("lateness", lateness_text(found["lateness_s"])),
    ]
    if found["tokens_by_layers_below_full"]:
        lines.append(("precision", precision_text(found["tokens_by_layers_below_full"])))
    lines += observed_lines(run.observed)
    prompts = found["prompt_tokens"]
    if prompts["asked"] != prompts["became"]:
        lines.append(("prompts", f"{prompts['asked']} tokens sent, {prompts['became']} as the server counts"))
    if by_precision := tokens_by_precision(run.observed.get("counted", {})):
        lines.append(("tokens", by_precision))
    return lines + [("note", note) for note in run.about.get("notes", [])]


def errors_text(errors: dict[str, int]) -> str:
    """Return the kinds of errors, the most frequent first."""
    return ", ".join(f"{count} x {kind}" for kind, count in errors.items()) or "none"


def lateness_text(lateness: dict[str, float] | None) -> str:
    """Return how late this process itself sent."""
    if lateness is None:
        return ABSENT
    values = ", ".join(f"{name} {lateness[name] * 1e3:.2f}" for name in ("p50", "p99", "max"))
    limit = LATE_S * 1e3
    note = "" if lateness["p99"] <= LATE_S else f": above {limit:g} ms, is this machine too busy?"
    return f"of this generator: {values} ms{note}"


def precision_text(tokens: dict[str, int]) -> str:
    total = sum(tokens.values())
    below = [(count, layers) for layers, count in tokens.items() if layers != "0"]
    full = [f"{share_at_full(tokens):.1%} of tokens with all layers at full precision"]
    return ", ".join(full + [f"{count / total:.1%} with {layers} below" for count, layers in below])


def tokens_by_precision(counted: dict[str, float]) -> str:
    """Return `full 91.0%, int4 9.0%` by the server's counters, "" if nothing was counted."""
    found = defaultdict[str, float](float)
    for name, value in counted.items():
        if precision := _PRECISION.search(name):
            found[precision[1]] += value
    total = sum(found.values())
    return ", ".join(f"{name} {value / total:.1%}" for name, value in found.items()) if total else ""


def observed_lines(observed: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a line for each instance and one for the morphs, [] if nothing was observed."""
    shapes = defaultdict[str, list[dict[str, Any]]](list)
    for sample in observed.get("samples", []):
        for name, shape in sample["instances"].items():
            shapes[name].append(shape)
    lines = [(name, _instance_text(shapes[name])) for name in sorted(shapes)]
    return [*lines, ("morphs", morphs_text(observed["morphs"]))] if observed.get("samples") else []


def _instance_text(shapes: Sequence[dict[str, Any]]) -> str:
    words: dict[str, Callable[[list[Any]], str]] = {
        "kv_blocks": lambda blocks: f"KV {_range(blocks)} blocks",
        "kv_used": lambda used: f"at most {max(used)} in use",
        "layers_below_full": lambda below: f"{_range(below)} layers below full",
        "tp": lambda degrees: f"tp {_range(degrees)}",
        "queue_delay_s": lambda delays: f"queueing up to {max(delays):.2f} s",
    }
    reported = {key: [shape[key] for shape in shapes if shape[key] is not None] for key in words}
    return ", ".join(words[key](values) for key, values in reported.items() if values)


def _range(values: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(values), max(values)})))


def morphs_text(morphs: Sequence[dict[str, Any]]) -> str:
    """Return `4 swap applied, 1 resize deferred`."""
    kinds = Counter(f"{one['kind']} {one['state']}" for one in morphs)
    return ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)) or "none"


def seconds_text(value: float) -> str:
    """Return three significant digits: 0.00123, 0.123, 12.3."""
    return f"{value:.5f}" if value < 0.01 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def comparison(runs: Sequence[RunFile]) -> Table:
    """Return a column for each run and a row for each number."""
    table = make_table([""], [escape(run.name) for run in runs])
    found = [run.summary for run in runs]
    for name, text in _ROWS.items():
        cells = [text(one) for one in found]
        if set(cells) != {ABSENT}:
            table.add_row(name, *cells)
    return table


def _latency(key: str, column: str) -> Callable[[dict[str, Any]], str]:
    return lambda found: ABSENT if found[key] is None else seconds_text(found[key][column])


_ROWS: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "requests sent": lambda found: str(found["requests"]),
    "served": lambda found: str(found["served"]),
    **{
        f"{name} {column}, s": _latency(key, column)
        for name, key in LATENCIES.items()
        for column in ("mean", "p95", "p99")
    },
    "TTFT violations": lambda found: f"{found['violations']['ttft']['share']:.1%}",
    "TPOT violations": lambda found: f"{found['violations']['tpot']['share']:.1%}",
    "goodput, requests/s": lambda found: f"{found['goodput']['requests_per_s']:.2f}",
    "goodput, tokens/s": lambda found: f"{found['goodput']['tokens_per_s']:.1f}",
    "output tokens/s": lambda found: f"{found['throughput']['output_tokens_per_s']:.1f}",
    "tokens at full precision": lambda found: (
        f"{share_at_full(tokens):.1%}" if (tokens := found["tokens_by_layers_below_full"]) else ABSENT
    ),
    "lateness p99, ms": lambda found: (
        ABSENT if found["lateness_s"] is None else f"{found['lateness_s']['p99'] * 1e3:.2f}"
    ),
}


def differing_loads(runs: Sequence[RunFile]) -> str:
    """Return why a comparison of the runs is doubtful, "" if it is not."""
    if len({run.about.get("arrivals_sha256") for run in runs}) > 1:
        return "these runs had different loads: their arrivals or lengths are not the same"
    if len({run.slo for run in runs}) > 1:
        return "these runs were held to different SLOs"
    return ""
