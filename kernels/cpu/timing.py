"""Times the kernels of products on this machine and keeps the choices in a file, one per machine and model.

What `kernels.cpu.choice` decides with is measured here: each kernel multiplies by weights of the model's
shapes that come from memory, as in a step. They are not the model's own, so that the shapes of other
tensor-parallel degrees and of precisions that no layer has yet are measured too. Workers of one machine that
load the same model measure once: the others wait and read the file. What there was no time for is measured
at the next start.
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
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import llvmlite.binding as llvm
import torch

from kernels.cpu.choice import MOST_FEW, TABLE, Choices, KernelName, candidates, counts, decide
from kernels.cpu.compiled import SOURCES_DIGEST
from kernels.cpu.program import KernelProgram
from kernels.cpu.quantized import can_run, multiply
from kernels.cpu.simd import LANES
from kernels.packing import packed_size
from kernels.product import Product, parse_product
from kernels.quantized import QuantizedWeight

log = logging.getLogger(__name__)

Pair = tuple[Product, int]  # with a number of tokens
Turns = dict[KernelName, Callable[[], object]]
Weight: TypeAlias = torch.Tensor | QuantizedWeight

VERSION = 2
MOST_SECONDS = 2.0  # limit for one model
ROUNDS = 6  # rounds of the candidates for one product and number of tokens
LEAST_ROUNDS = 3  # enough to decide, where time ends
TURN_BYTES = 8 << 20  # weights in one turn of one kernel
MOST_WEIGHTS = 32  # matrices in one turn
MEMORY_BYTES = 64 << 20  # what a turn read has left the caches when its memory's turn comes again
AT_ONCE = 6  # quantised products
BY_IMPORTANCE = (1, 16, 4, 64, 256, 2, 8, 32, 12, 128)


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
    pairs: Sequence[Pair], seconds: float = MOST_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """Time all kernels that can multiply these products, in this order of numbers of tokens.

    Products of one number of tokens take turns, so each gets its share of the time. It takes `seconds` at
    most, and one turn more; pairs that it does not come to are missing.
    """
    memory = WeightMemory()
    end = clock() + seconds
    measured = Measured({product: {} for product, _ in pairs})
    for tokens, group in groupby(pairs, key=lambda pair: pair[1]):
        turns = {product: _turns(product, memory, tokens) for product, _ in group}
        found = {product: {name: list[float]() for name in able} for product, able in turns.items()}
        is_over = not _take_turns(turns, found, measured, end, clock)
        for product, rounds in found.items():
            if _num_rounds(rounds) >= (LEAST_ROUNDS if is_over else ROUNDS):
                measured.times[product][tokens] = rounds
        if is_over:
            break
    return measured


def _take_turns(
    turns: Mapping[Product, Turns],
    found: Mapping[Product, dict[KernelName, list[float]]],
    measured: Measured,
    end: float,
    clock: Callable[[], float],
) -> bool:
    """Run all turns until each has its rounds; False: the time ended before."""
    # Round by round: what a product reads is out of the caches again when its turn comes.
    while left := [product for product in turns if _num_rounds(found[product]) < ROUNDS]:
        for product in left:
            before, seconds_of = _interruptions(), dict[KernelName, float]()
            for name, turn in turns[product].items():
                if clock() > end:
                    return False
                began = clock()
                turn()
                seconds_of[name] = clock() - began
            measured.num_rounds += 1
            if _interruptions() > before:
                measured.num_interrupted += 1
                continue
            for name, taken in seconds_of.items():
                found[product][name].append(taken)
    return True


def _num_rounds(rounds: Mapping[KernelName, list[float]]) -> int:
    return min(map(len, rounds.values()))


def _interruptions() -> int:
    """Return how often another process took a processor from this one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class WeightMemory:
    """Memory that weights of any product are laid over, one after the other."""

    def __init__(self) -> None:
        # In each dtype these bytes are numbers around 1; pages that nobody wrote would be one page of zeros.
        self._bytes = torch.full((MEMORY_BYTES,), 0x3F, dtype=torch.uint8)
        self._used = 0

    def take(self, product: Product) -> list[Weight]:
        """Return weights of some TURN_BYTES; of a matrix that is larger, its first rows.

        They are as many more than whole lanes as all its rows, so that the same kernels can run.
        """
        row = self._row_bytes(product)
        rows, columns = product.outputs, product.inputs
        if product.form == "linear_t":
            rows, columns = columns, rows
        left_out = max(0, rows - TURN_BYTES // row)
        rows = max(LANES, rows - -(-left_out // LANES) * LANES)
        count = max(1, min(MOST_WEIGHTS, TURN_BYTES // (rows * row)))
        return [self._one(product, rows, columns) for _ in range(count)]

    @staticmethod
    def _row_bytes(product: Product) -> int:
        if product.form == "quantized":
            bits, _ = product.coding
            return packed_size(product.inputs, bits)
        row = product.outputs if product.form == "linear_t" else product.inputs
        return int(row * getattr(torch, product.dtype).itemsize)

    def _one(self, product: Product, rows: int, columns: int) -> Weight:
        if product.form != "quantized":
            dtype = getattr(torch, product.dtype)
            tensor: torch.Tensor = self._tensor(rows * columns * dtype.itemsize).view(dtype)
            return tensor.view(rows, columns)
        bits, group = product.coding
        groups = columns // group
        codes = self._tensor(rows * self._row_bytes(product)).view(1, rows, -1)
        scales = self._tensor(rows * groups * 2).view(torch.float16).view(1, rows, groups)
        zeros = self._tensor(rows * groups).view(1, rows, groups)
        return QuantizedWeight(codes, scales, zeros, bits, group)

    def _tensor(self, nbytes: int) -> torch.Tensor:
        """Return the next bytes, from the beginning again where the end is too near."""
        if self._used + nbytes > MEMORY_BYTES:
            self._used = 0
        begin, self._used = self._used, self._used + -(-nbytes // 64) * 64
        if begin + nbytes > MEMORY_BYTES:  # one row of a huge matrix
            self._bytes = torch.full((nbytes,), 0x3F, dtype=torch.uint8)
        return self._bytes[begin : begin + nbytes]


def _turns(product: Product, memory: WeightMemory, tokens: int) -> Turns:
    """Return for each kernel a call that multiplies by weights of its own, as a step does.

    Steps of few tokens are recorded (`kernels.cpu.program`), as far as the kernels are our own: there a
    product does not wait for threads to wake up.
    """
    dtype = torch.float32 if product.form == "quantized" else getattr(torch, product.dtype)
    turns: Turns = {}
    for name in candidates(product, tokens):
        some = memory.take(product)
        first = some[0]
        rows = first.shape[0] if isinstance(first, torch.Tensor) else 0
        x = torch.ones(tokens, rows if product.form == "linear_t" else product.inputs, dtype=dtype)
        if can_run(name, product.form, x, first):
            call = partial(_multiply_all, name, product, x, some)
            is_recorded = tokens <= MOST_FEW and name != "torch"
            turns[name] = KernelProgram(call).run if is_recorded else call
    return turns


def _multiply_all(name: KernelName, product: Product, x: torch.Tensor, some: list[Weight]) -> torch.Tensor:
    made = [multiply(name, product.form, x, weight) for weight in some]
    return made[-1]


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


def choose(products: Sequence[Product], model: str) -> Choices:
    """Put the fastest kernels for these products into force, the first ones first, and return them.

    They are read from the file of the model and this machine, or measured and written to it. A folder that
    cannot be written costs a warning, and a measurement at the next start.
    """
    path = choices_file(model)
    with _alone(path):
        known = load(path, model) or {}
        missing = missing_pairs(products, known)
        if missing:
            known = _measured(missing, known, model, path)
    TABLE.adopt(known)
    return {product: known.get(product, {}) for product in products}


def missing_pairs(products: Iterable[Product], known: Choices) -> list[Pair]:
    """Return what is to be measured, in order: usual numbers of tokens first, in each the first products.

    A quantised product is known once all its numbers are, so a few such products are finished before others
    begin: each start gets on, however little time it has.
    """
    wanted = [
        (product, tokens)
        for tokens in BY_IMPORTANCE
        for product in dict.fromkeys(products)
        if tokens in counts(product) and tokens not in known.get(product, {})
    ]
    quantized = [product for product in dict.fromkeys(dict(wanted)) if product.form == "quantized"]
    later = {product: number // AT_ONCE for number, product in enumerate(quantized)}
    return sorted(wanted, key=lambda pair: later.get(pair[0], 0))


def _measured(
    missing: Sequence[Pair], known: Choices, model: str, path: Path
) -> dict[Product, dict[int, KernelName]]:
    """Measure, and write what is known then to `path`."""
    began = time.perf_counter()
    measured = measure(missing)
    found = decide(measured.times)
    choices = {
        product: {**known.get(product, {}), **found.get(product, {})} for product in {**known, **found}
    }
    left = len(missing_pairs(dict(missing), choices))
    log.info(
        "timed the kernels of %d products in %.2f s%s",
        len(found),
        time.perf_counter() - began,
        f"; {left} timings are left for the next start" if left else "",
    )
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
