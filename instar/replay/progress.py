"""The progress of a run: a line that changes on a terminal, a line every ten seconds elsewhere.

The loop that sends also draws it, in one or two milliseconds, so it is drawn seldom.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from instar.replay.generator import RunState
from instar.replay.traces import Workload

TERMINAL_S: Final = 0.5
ELSEWHERE_S: Final = 10.0


async def show_progress(run: RunState, workload: Workload) -> None:
    """Show the progress until cancelled."""
    console = Console(stderr=True)
    if not console.is_terminal:
        while True:
            await asyncio.sleep(ELSEWHERE_S)
            console.print(line(run, workload), highlight=False, soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        while True:
            live.update(Text(line(run, workload)), refresh=True)
            await asyncio.sleep(TERMINAL_S)


def line(run: RunState, workload: Workload) -> str:
    ends_s = workload.arrivals[-1].at_s
    at_s = max(run.now_s, 0.0)
    where = f"{at_s:.0f} of {ends_s:.0f} s" if at_s <= ends_s else f"{at_s - ends_s:.0f} s after the last"
    tokens = run.events_in[int(run.now_s) - 1]
    text = (
        f"{where}: {run.num_sent} of {len(workload.arrivals)} sent, {run.num_open} open, "
        f"{run.num_served} served, {tokens} tokens/s"
    )
    return text + failures_text(run.errors)


def failures_text(errors: Mapping[str, int]) -> str:
    """Return how many were refused with a status and failed otherwise, each with the commonest reason."""
    text = ""
    for how, is_refused in (("refused", True), ("failed", False)):
        kinds = {kind: count for kind, count in errors.items() if kind[:1].isdigit() == is_refused}
        if kinds:
            mostly = "mostly " if len(kinds) > 1 else ""
            text += f", {sum(kinds.values())} {how} ({mostly}{max(kinds, key=lambda kind: kinds[kind])})"
    return text
