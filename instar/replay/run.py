"""`instar bench`: what each verb does. Exit status 0; 1 where no server answers, or serves a request of a
run; 2 for bad input."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from bus.settings import Settings
from instar.address import is_own, url_of
from instar.client import GatewayProblem
from instar.errors import BenchProblem, ServerProblem
from instar.output.tables import trimmed
from instar.replay import files, plots
from instar.replay.card import card, comparison, differing_loads
from instar.replay.files import RunFile
from instar.replay.generator import Generator
from instar.replay.observer import Observer
from instar.replay.outcomes import outcome_of
from instar.replay.progress import follow
from instar.replay.requests import IDS, Dialect, bodies, find_dialect, models_of
from instar.replay.statistics import Slo
from instar.replay.traces import Shaping, Trace, load
from instar.replay.wire import Server

PICTURE = "run.png"
COMPARISON = "compare.png"


def bench(settings: Settings, args: argparse.Namespace) -> int:
    try:
        if args.verb == "record":
            from instar.replay.record import record

            return record(settings, args)
        if args.verb == "plot":
            return _plot([files.read(folder) for folder in args.folders], args.out or args.folders[0])
        return _replay(settings, args)
    except (BenchProblem, GatewayProblem) as problem:
        sys.stderr.write(f"instar bench {args.verb}: {problem}\n")
        return 1 if isinstance(problem, GatewayProblem | ServerProblem) else 2


def _plot(runs: list[RunFile], out: Path | None) -> int:
    """One: its card and picture; several: over one another."""
    console, runs = Console(), files.told_apart(runs)
    with trimmed(console):
        console.print(card(runs[0]) if len(runs) == 1 else comparison(runs))
    if len(runs) > 1 and (doubt := differing_loads(runs)):
        sys.stderr.write(f"note: {doubt}\n")
    if out is not None:
        folder = out if out.is_dir() or not out.exists() else out.parent
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (PICTURE if len(runs) == 1 else COMPARISON)
        plots.draw(runs, path)
        console.print(f"picture: {path}", highlight=False, soft_wrap=True)
    return 0


def _replay(settings: Settings, args: argparse.Namespace) -> int:
    others = [files.read(folder) for folder in args.compare]
    if args.trace is None:
        if not others:
            raise BenchProblem("name a trace, or runs to --compare")
        return _plot(others, args.out)
    start_s, length_s = args.window
    shaping = Shaping(start_s, length_s, args.keep_zero, args.limit, args.scale, args.scale_lengths)
    trace = load(args.trace, args.format, shaping, args.seed)
    if args.out is not None:
        files.make_ready(args.out, len(trace.arrivals), trace.seconds + args.drain, draws=not args.no_plot)
        if not args.no_plot:
            plots.need_matplotlib()
    run = _run(run_of(settings, args, trace))
    if args.json:
        sys.stdout.write(json.dumps(run.summary) + "\n")
    else:
        console = Console()
        with trimmed(console):
            console.print(card(run))
    if args.out is not None:
        files.write(args.out, run)
        if not args.no_plot:
            plots.draw([run], args.out / PICTURE)
        sys.stderr.write(f"kept in {args.out}\n")
    if others:
        _plot([run, *others], args.out)
    if run.about["was_interrupted"]:
        return 130
    if not any(one.is_served for one in run.outcomes):
        sys.stderr.write(f"instar bench replay: none of {len(run.outcomes)} requests was served\n")
        return 1
    return 0


def _run(work: Coroutine[Any, Any, RunFile]) -> RunFile:
    """In uvloop's loop where it is installed: it wakes sooner and reads cheaper."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def run_of(settings: Settings, args: argparse.Namespace, trace: Trace) -> RunFile:
    """Ctrl-C ends it early, with what there is. Raises BenchProblem."""
    url = args.url or url_of(settings.gateway)
    key, admin_key = _own_keys(settings, url)
    server = Server.at(url, args.key or key)
    models = await models_of(server)
    model = args.served or (models[0]["id"] if models else None)
    if model is None:
        raise ServerProblem(f"{url} serves no model yet")
    ids = args.token_ids or IDS
    dialect, said = await find_dialect(server, model, ids)
    notes = [*trace.notes, *_notes(trace, dialect, said, _context_of(models, model))]
    generator = Generator(
        server,
        trace.arrivals,
        bodies(trace.arrivals, model, dialect, args.seed, ids),
        drain_s=args.drain,
        name=f"replay-{int(time.time())}",
    )
    observer = Observer(Server.at(url, args.admin_key or admin_key or server.key))
    why_blind = await observer.begin()
    if why_blind:
        notes.append(f"of the server: {why_blind}")
    for note in notes:  # at once: what is known to be refused may not be what was meant
        sys.stderr.write(f"note: {note}\n")
    was_interrupted = await _go(generator, None if why_blind else observer, trace)
    if was_interrupted:
        notes.append(
            f"interrupted after {generator.run.now_s:.1f} s; what ran then or was not due is left out"
        )
    about = {
        "name": args.out.name if args.out else Path(trace.source).stem,
        "source": trace.source,
        "format": trace.format,
        "url": url,
        "model": model,
        "window": list(args.window),
        "scale": args.scale,
        "scale_lengths": args.scale_lengths,
        "seed": args.seed,
        "dialect": dialect.in_words,
        "zero_rows": trace.zero_rows,
        "arrivals_sha256": trace.digest,
        "began_at": round(generator.run.began_at, 3),
        "was_interrupted": was_interrupted,
        "notes": notes,
    }
    observed = {} if why_blind else _observed(observer)
    return RunFile(
        about,
        _slo(settings, args),
        _rounded(generator),
        observed,
        _per_second(generator),
        {kind: said for kind, said in generator.run.said.items() if said},
        args.out,
    )


def _own_keys(settings: Settings, url: str) -> tuple[str | None, str | None]:
    """For /v1 and for /admin, those of the settings, for their own service."""
    if not is_own(settings.gateway, url):
        return None, None
    return next(iter(settings.gateway.api_keys), None), next(iter(settings.gateway.admin_keys), None)


def _context_of(models: list[dict[str, Any]], model: str) -> int | None:
    return next((one.get("max_model_len") for one in models if one.get("id") == model), None)


def _notes(trace: Trace, dialect: Dialect, said: str, context: int | None) -> list[str]:
    notes = []
    if dialect != Dialect():
        notes.append(dialect.in_words)
    if said:
        notes.append(f"a trial request was answered {said}")
    if trace.zero_rows:
        notes.append(f"{trace.zero_rows} rows of zero tokens (--keep-zero or --drop-zero says what of them)")
    too_long = [one for one in trace.arrivals if context and one.prompt_tokens + one.output_tokens > context]
    if too_long:
        notes.append(
            f"{len(too_long)} of {len(trace.arrivals)} requests are longer than the model's context of "
            f"{context} tokens, and will be refused: --scale-lengths makes them shorter"
        )
    return notes


async def _go(generator: Generator, observer: Observer | None, trace: Trace) -> bool:
    """Whether it was interrupted."""
    run = generator.run
    beside = [asyncio.create_task(follow(run, trace))]
    if observer is not None:
        beside.append(asyncio.create_task(observer.follow(lambda: run.now_s)))
    was_interrupted = False
    try:
        await generator.replay()
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


def _slo(settings: Settings, args: argparse.Namespace) -> Slo:
    return Slo(args.slo_ttft or settings.slo.ttft_s, args.slo_tpot or settings.slo.tpot_s)


def _rounded(generator: Generator) -> list[Any]:
    """As they are kept, so that the numbers now are those of the file."""
    return [outcome_of(one.as_json()) for one in generator.run.outcomes]


def _observed(observer: Observer) -> dict[str, Any]:
    return {
        "samples": observer.samples,
        "missed": observer.num_missed,
        "morphs": list(observer.morphs.values()),
        "counted": observer.counted,
    }


def _per_second(generator: Generator) -> list[int]:
    events = generator.run.events_in
    return [events[second] for second in range(max(events, default=-1) + 1)]
