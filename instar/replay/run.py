"""`instar bench replay` and `plot`: a run from its trace to its card, file and picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bus.settings import GatewaySettings, Settings
from instar.client import settings_of
from instar.errors import InputError, ServerError
from instar.output.progress import bar, progress_line
from instar.output.tables import trimmed
from instar.replay import files, plots
from instar.replay.card import card, comparison, differing_loads
from instar.replay.files import RunFile
from instar.replay.generator import Generator, RunState
from instar.replay.observer import Observer
from instar.replay.requests import IDS, Dialect, bodies, find_dialect, models_of
from instar.replay.statistics import Slo
from instar.replay.traces import Shaping, Workload, load
from instar.replay.wire import ServerAddress
from instar.running import locate

PICTURE = "run.png"
COMPARISON = "compare.png"
# Progress is drawn on the loop that also sends, in a millisecond or two, so seldom.
TERMINAL_S: Final = 0.5
ELSEWHERE_S: Final = 10.0


def plot(args: argparse.Namespace) -> int:
    return _show([files.read(folder) for folder in args.folders], args.out or args.folders[0])


def replay(args: argparse.Namespace) -> int:
    """Return 1 if no request was served, 130 after Ctrl-C."""
    settings = settings_of(args)
    others = [files.read(folder) for folder in args.compare]
    if args.trace is None:
        if not others:
            raise InputError("name a trace, or runs to --compare")
        return _show(others, args.out)
    start_s, length_s = args.window
    shaping = Shaping(start_s, length_s, args.keep_zero, args.limit, args.scale, args.scale_lengths)
    workload = load(args.trace, args.format, shaping, args.seed)
    draws = args.out is not None and not args.no_plot
    if draws and find_spec("matplotlib") is None:
        draws = False
        _note(
            "no picture: matplotlib is not installed (pip install 'instar[bench]'). `instar bench plot` "
            "draws it later; --no-plot avoids this note"
        )
    if args.out is not None:
        files.prepare(args.out, len(workload.arrivals), workload.seconds + args.drain, draws=draws)
    run = _run(run_of(settings, args, workload))
    if args.json:
        sys.stdout.write(json.dumps(run.summary) + "\n")
    else:
        with trimmed() as console:
            console.print(card(run))
    if args.out is not None:
        files.write(args.out, run)
        if draws:
            plots.draw([run], args.out / PICTURE)
        sys.stderr.write(f"wrote {args.out}\n")
    if others:
        _show([run, *others], args.out if draws else None)
    if run.about["was_interrupted"]:
        return 130
    if not any(one.is_served for one in run.outcomes):
        sys.stderr.write(f"{args.prog}: none of {len(run.outcomes)} requests was served\n")
        return 1
    return 0


def _show(runs: Sequence[RunFile], out: Path | None) -> int:
    """Print the card of one run or a comparison of several, and draw it in the folder `out`."""
    runs = files.with_unique_names(runs)
    is_alone = len(runs) == 1
    with trimmed() as console:
        console.print(card(runs[0]) if is_alone else comparison(runs))
    if doubt := differing_loads(runs):
        _note(doubt)
    if out is not None:
        folder = out if out.is_dir() or not out.exists() else out.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {folder}: cannot be made: {error.strerror}") from error
        path = folder / (PICTURE if is_alone else COMPARISON)
        plots.draw(runs, path)
        console.print(f"picture: {path}", highlight=False, soft_wrap=True)
    return 0


def _note(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")


def _run(work: Coroutine[Any, Any, RunFile]) -> RunFile:
    """Run in uvloop where it is installed: it wakes sooner and reads cheaper."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def run_of(settings: Settings, args: argparse.Namespace, workload: Workload) -> RunFile:
    """Send the workload. Ctrl-C ends it early with what there is. Raises CommandError."""
    url, is_own = locate(settings.gateway, args.url)
    own = settings.gateway if is_own else GatewaySettings()
    server = ServerAddress.at(url, args.api_key or next(iter(own.api_keys), None))
    models = await models_of(server)
    model = args.model or (models[0]["id"] if models else None)
    if model is None:
        raise ServerError(f"{url} serves no model yet")
    ids = args.token_ids or IDS
    dialect, refusal = await find_dialect(server, model, ids)
    context = next((one.get("max_model_len") for one in models if one.get("id") == model), None)
    notes = [*workload.notes, *_notes(workload, dialect, refusal, context)]
    generator = Generator(
        server,
        workload.arrivals,
        bodies(workload.arrivals, model, dialect, args.seed, ids),
        drain_s=args.drain,
        name=f"replay-{int(time.time())}",
    )
    observer = Observer(ServerAddress.at(url, args.admin_key or next(iter(own.admin_keys), server.key)))
    why_not_observed = await observer.begin()
    if why_not_observed:
        notes.append(f"of the server: {why_not_observed}")
    for note in notes:  # before the run: a note may say that it is not what was meant
        _note(note)
    was_interrupted = await _send(generator, None if why_not_observed else observer, workload)
    state = generator.run
    if was_interrupted:
        notes.append(f"interrupted after {state.now_s:.1f} s; requests that had not ended are left out")
    about = {
        "name": args.out.name if args.out else Path(workload.source).stem,
        "source": workload.source,
        "format": workload.format,
        "url": url,
        "model": model,
        "window": list(args.window),
        "scale": args.scale,
        "scale_lengths": args.scale_lengths,
        "seed": args.seed,
        "dialect": dialect.in_words,
        "zero_rows": workload.zero_rows,
        "arrivals_sha256": workload.digest,
        "began_at": round(state.began_at, 3),
        "was_interrupted": was_interrupted,
        "notes": notes,
    }
    return RunFile(
        about,
        Slo(args.slo_ttft or settings.slo.ttft_s, args.slo_tpot or settings.slo.tpot_s),
        [one.rounded() for one in state.outcomes],
        {} if why_not_observed else observer.as_json(),
        state.events_per_s,
        {kind: message for kind, message in state.said.items() if message},
        str(args.out or ""),
    )


def _notes(workload: Workload, dialect: Dialect, refusal: str, context: int | None) -> list[str]:
    notes = []
    if dialect != Dialect():
        notes.append(dialect.in_words)
    if refusal:
        notes.append(f"a trial request was answered {refusal}")
    if workload.zero_rows:
        notes.append(f"{workload.zero_rows} requests with zero tokens (see --keep-zero and --drop-zero)")
    arrivals = workload.arrivals
    too_long = [one for one in arrivals if context and one.prompt_tokens + one.output_tokens > context]
    if too_long:
        notes.append(
            f"{len(too_long)} of {len(arrivals)} requests are longer than the model's context of {context} "
            "tokens, and will be refused: --scale-lengths makes them shorter"
        )
    return notes


async def _send(generator: Generator, observer: Observer | None, workload: Workload) -> bool:
    """Return True if the run was interrupted."""
    run = generator.run
    beside = [asyncio.create_task(show_progress(run, workload))]
    if observer is not None:
        beside.append(asyncio.create_task(observer.follow(lambda: run.now_s)))
    try:
        await generator.replay()
        was_interrupted = False
    except asyncio.CancelledError:  # Ctrl-C
        was_interrupted = True
        if task := asyncio.current_task():
            task.uncancel()
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    if observer is not None:
        await observer.end(lambda: run.now_s)
    return was_interrupted


async def show_progress(run: RunState, workload: Workload) -> None:
    """Show the progress until cancelled: on a terminal one line, elsewhere a line now and then."""
    with progress_line("") as line:
        while True:
            await asyncio.sleep(TERMINAL_S if line.is_watched else ELSEWHERE_S)
            if line.is_watched:
                share = run.now_s / (workload.arrivals[-1].at_s or 1.0)
                line.show(f"{bar(share)} {progress_text(run, workload)}")
            else:
                line.end(progress_text(run, workload))


def progress_text(run: RunState, workload: Workload) -> str:
    ends_s = workload.arrivals[-1].at_s
    at_s = max(run.now_s, 0.0)
    where = f"{at_s:.0f} of {ends_s:.0f} s" if at_s <= ends_s else f"{at_s - ends_s:.0f} s after the last"
    return (
        f"{where}: {run.num_sent} of {len(workload.arrivals)} sent, {run.num_open} open, {run.num_served} "
        f"served, {run.events_in[int(run.now_s) - 1]} tokens/s{failures_text(run.errors)}"
    )


def failures_text(errors: Mapping[str, int]) -> str:
    """Return how many were refused with a status and failed otherwise, each with the commonest reason."""
    text = ""
    for how, is_refused in (("refused", True), ("failed", False)):
        kinds = {kind: count for kind, count in errors.items() if kind[:1].isdigit() == is_refused}
        if kinds:
            mostly = "mostly " if len(kinds) > 1 else ""
            text += f", {sum(kinds.values())} {how} ({mostly}{max(kinds, key=lambda kind: kinds[kind])})"
    return text
