"""The cost of structured output: a step with masks beside one without.

``python -m bench.structured`` runs the demo model with 16 sequences, with a schema and without one in turns.
Both ways make the same number of tokens, with log-probabilities, so that the host chooses in both. It ends
in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from bench.common.engines import INSTANCE, EngineShape, close, load_engine
from bench.common.results import DEMO
from bus.messages import Grammar, SamplingParams
from worker.engine.engine import Engine
from worker.engine.sequence import own_request
from worker.grammars.compiler import GuidanceCompiler

# Its answers do not end before the last step: 400 texts, each of 20 to 40 characters.
TEXTS = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 40}, "minItems": 400}


def step_seconds(
    engine: Engine, name: str, num_seqs: int, num_out: int, grammar: Grammar | None
) -> list[float]:
    """Run `num_seqs` requests for `num_out` tokens; return the seconds of each step in which all decode."""
    sampling = [
        SamplingParams(max_tokens=num_out, seed=i, temperature=1.0, logprobs=0, grammar=grammar)
        for i in range(num_seqs)
    ]
    for i, one in enumerate(sampling):
        engine.submit(INSTANCE, own_request(f"{name} {i}", [9, 30, 77 + i], one))
    found = []
    while engine.has_work:
        if not engine.can_step():
            time.sleep(0.0005)
            continue
        began = time.perf_counter()
        results = engine.step()
        took = time.perf_counter() - began
        if sum(bool(output.delta.token_ids) for result in results for output in result.outputs) == num_seqs:
            found.append(took)
    return found[2:]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--seqs", type=int, default=16)
    parser.add_argument("--out", type=int, default=96, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-mb", type=int, default=192)
    options = parser.parse_args(arguments)
    shape = EngineShape(max_num_seqs=options.seqs, max_model_len=512)
    engine = load_engine(options.model, shape, options.memory_mb, grammars=GuidanceCompiler)
    grammar = Grammar(kind="json_schema", text=json.dumps(TEXTS), end_token_ids=(1,))
    found: dict[str, list[float]] = {"plain": [], "formed": []}
    for turn in range(1 + options.rounds):
        for name, one in (("plain", None), ("formed", grammar)):
            steps = step_seconds(engine, f"{name} {turn}", options.seqs, options.out, one)
            found[name] += steps if turn else []
    close(engine)
    medians = {name: statistics.median(steps) for name, steps in found.items()}
    overhead = medians["formed"] / medians["plain"] - 1
    line = {
        "seqs": options.seqs,
        "step_ms": {name: round(1000 * one, 3) for name, one in medians.items()},
        "steps": {name: len(steps) for name, steps in found.items()},
        "overhead": round(overhead, 4),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
