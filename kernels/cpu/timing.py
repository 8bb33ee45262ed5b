"""Times the kernels of products on this machine and keeps the choices in a file, one per machine and model.

What `kernels.cpu.choice` decides with is measured here: each kernel multiplies by the model's own weights, so
that they come from memory as in a step. Workers of one machine that load the same model measure
once: the others wait and read the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch

from kernels.cpu.choice import (
    COUNTS,
    MOST_FEW,
    TABLE,
    Choices,
    Form,
    KernelName,
    Product,
    candidates,
    decide,
    parse_product,
)
from kernels.cpu.compiled import SOURCES_DIGEST
from kernels.cpu.products import can_run, multiply
from kernels.cpu.program import KernelProgram

log = logging.getLogger(__name__)

Weights = Mapping[Product, Sequence[torch.Tensor]]

VERSION = 1
MOST_SECONDS = 1.5  # limit for one model
ROUNDS = 8  # rounds of the candidates for one product and number of tokens
TURN_BYTES = 16 << 20  # weights in one turn of one kernel


def products_of(weights: Iterable[tuple[Form, torch.Tensor]]) -> dict[Product, list[torch.Tensor]]:
    """Group weights by the product that they are for; [N, K] for "linear", [K, N] for "linear_t"."""
    found: dict[Product, list[torch.Tensor]] = {}
    for form, weight in weights:
        outputs, inputs = weight.shape if form == "linear" else weight.t().shape
        product = Product(form, str(weight.dtype).removeprefix("torch."), outputs, inputs)
        found.setdefault(product, []).append(weight)
    return found


@dataclass(slots=True)
class Measured:
    """The seconds of each round of each kernel, by product and number of tokens."""

    times: dict[Product, dict[int, dict[KernelName, list[float]]]]
    num_rounds: int = 0
    num_interrupted: int = 0  # rounds in which another process took a processor: they do not count

    @property
    def was_busy(self) -> bool:
        """True if the machine was too busy for times to say much."""
        return self.num_interrupted > self.num_rounds / 2


def measure(
    weights: Weights, seconds: float = MOST_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """Time all kernels that can multiply by these weights, few tokens first.

    It takes `seconds` at most, and one turn more; numbers of tokens that it does not come to are missing.
    """
    end = clock() + seconds
    measured = Measured({product: {} for product in weights})
    for tokens in COUNTS:
        turns = {product: _turns(product, same, tokens) for product, same in weights.items()}
        found = {product: {name: list[float]() for name in able} for product, able in turns.items()}
        # Round by round: what a product reads is out of the caches again when its turn comes.
        while left := [product for product in turns if _num_rounds(found[product]) < ROUNDS]:
            for product in left:
                before, seconds_of = _interruptions(), dict[KernelName, float]()
                for name, turn in turns[product].items():
                    if clock() > end:
                        return measured
                    began = clock()
                    turn()
                    seconds_of[name] = clock() - began
                measured.num_rounds += 1
                if _interruptions() > before:
                    measured.num_interrupted += 1
                    continue
                for name, taken in seconds_of.items():
                    found[product][name].append(taken)
        for product, rounds in found.items():
            measured.times[product][tokens] = rounds
    return measured


def _num_rounds(rounds: Mapping[KernelName, list[float]]) -> int:
    return min(map(len, rounds.values()))


def _interruptions() -> int:
    """Return how often another process took a processor from this one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _turns(
    product: Product, same: Sequence[torch.Tensor], tokens: int
) -> dict[KernelName, Callable[[], object]]:
    """Return for each kernel a call that multiplies by some of the weights, as a step does.

    Steps of few tokens are recorded (`kernels.cpu.program`), as far as the kernels are our own: there a
    product does not wait for threads to wake up.
    """
    x = torch.randn(tokens, product.inputs).to(same[0].dtype)
    some = same[: max(1, TURN_BYTES // same[0].nbytes)]

    def multiply_all(name: KernelName) -> torch.Tensor:
        made = [multiply(name, product.form, x, weight) for weight in some]
        return made[-1]

    turns: dict[KernelName, Callable[[], object]] = {}
    for name in candidates(product, tokens):
        if can_run(name, product.form, x, same[0]):
            call = partial(multiply_all, name)
            is_recorded = tokens <= MOST_FEW and name != "torch"
            turns[name] = KernelProgram(call).run if is_recorded else call
    return turns


# --------------------------------------------------------------------------- the file


def machine() -> dict[str, Any]:
    """Return all that choices depend on beside the model."""
    return {
        "processor": llvm.get_host_cpu_name(),
        "features": hashlib.sha256(llvm.get_host_cpu_features().flatten().encode()).hexdigest()[:12],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": SOURCES_DIGEST,
    }


def choices_file(model: str) -> Path:
    """Return the file for a model, which is named by its digest or path, on this machine."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    name = hashlib.sha256(json.dumps([model, machine()], sort_keys=True).encode()).hexdigest()[:16]
    return users / "instar" / f"products-{name}.json"


def save(path: Path, model: str, choices: Choices) -> None:
    """Write choices; a reader sees the old file or the new one. Raises OSError."""
    rows = {str(product): {str(n): name for n, name in names.items()} for product, names in choices.items()}
    text = json.dumps(
        {"version": VERSION, "model": model, "machine": machine(), "choices": rows}, indent=1, sort_keys=True
    )
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as written:
        written.write(text)
    Path(written.name).replace(path)


def load(path: Path, model: str) -> dict[Product, dict[int, KernelName]] | None:
    """Return the choices in a file; None if there is none, or, with a warning, if it is not to be used."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read (%s): kernels of products are timed again", path, error)
        return None
    try:
        stored = json.loads(text)
        if (stored["version"], stored["model"], stored["machine"]) != (VERSION, model, machine()):
            log.warning("%s is of another machine or model: kernels of products are timed again", path)
            return None
        return {parse_product(key): _names(key, names) for key, names in stored["choices"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%r): kernels of products are timed again", path, error)
        return None


def _names(key: str, names: dict[str, KernelName]) -> dict[int, KernelName]:
    product = parse_product(key)
    read = {int(tokens): name for tokens, name in names.items()}
    for tokens, name in read.items():
        if name not in candidates(product, tokens):
            raise ValueError(f"{name!r} cannot multiply {tokens} tokens")
    return read


# --------------------------------------------------------------------------- both


def choose(weights: Weights, model: str) -> Choices:
    """Put the fastest kernels for these products into force, and return them.

    They are read from the file of the model and this machine, or measured and written to it. A folder that
    cannot be written costs a warning, and a measurement at the next start.
    """
    path = choices_file(model)
    with _alone(path):
        choices: Choices | None = load(path, model)
        if choices is None or not choices.keys() >= weights.keys():
            choices = _measured(weights, model, path)
    TABLE.adopt(choices)
    return choices


def _measured(weights: Weights, model: str, path: Path) -> Choices:
    """Measure, and write the choices to `path`."""
    began = time.perf_counter()
    measured = measure(weights)
    choices = decide(measured.times)
    log.info("timed the kernels of %d products in %.2f s", len(choices), time.perf_counter() - began)
    if measured.was_busy:
        log.info("the machine was busy meanwhile: they are timed again at the next start")
        return choices
    try:
        save(path, model, choices)
    except OSError as error:
        log.warning("%s cannot be written (%s)", path, error)
    return choices


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time measure; without a folder to lock in, go on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / "products.lock").open("w")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
