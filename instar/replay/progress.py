"""How far a run is: one line that changes on a terminal, one every ten seconds elsewhere.

Drawn on the loop that also sends, so seldom and short: it costs a millisecond or two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from instar.replay.generator import Run
from instar.replay.traces import Trace

TERMINAL_S: Final = 0.5
ELSEWHERE_S: Final = 10.0


async def follow(run: Run, trace: Trace) -> None:
    """Until it is cancelled."""
    console = Console(stderr=True)
    if not console.is_terminal:
        while True:
            await asyncio.sleep(ELSEWHERE_S)
            console.print(line(run, trace), highlight=False, soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        while True:
            live.update(Text(line(run, trace)), refresh=True)
            await asyncio.sleep(TERMINAL_S)


def line(run: Run, trace: Trace) -> str:
    ends_s = trace.arrivals[-1].at_s
    at_s = max(run.now_s, 0.0)
    where = f"{at_s:.0f} of {ends_s:.0f} s" if at_s <= ends_s else f"{at_s - ends_s:.0f} s after the last"
    tokens = run.events_in[int(run.now_s) - 1]
    told = (
        f"{where}: {run.num_sent} of {len(trace.arrivals)} sent, {run.num_open} open, "
        f"{run.num_served} served, {tokens} tokens/s"
    )
    return told + failures_text(run.errors)


def failures_text(errors: Mapping[str, int]) -> str:
    """Refused with a status, and failed otherwise: how many, and what most of them said."""
    told = ""
    for how, is_refused in (("refused", True), ("failed", False)):
        kinds = {kind: count for kind, count in errors.items() if kind[:1].isdigit() == is_refused}
        if kinds:
            mostly = "mostly " if len(kinds) > 1 else ""
            told += f", {sum(kinds.values())} {how} ({mostly}{max(kinds, key=lambda kind: kinds[kind])})"
    return told
