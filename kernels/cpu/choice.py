"""The kernel for each kind of product, sizes and number of tokens: a table; nothing is timed here.

=======  ====================================================  =====================
kernel   what it is                                            runs
=======  ====================================================  =====================
few      reads the weights once, four rows at a time           up to MOST_FEW tokens
row      the same, row by row                                  2 to MOST_ROW tokens, weights [N, K]
pairs    pairs of bfloat16 without widening them               up to MOST_FEW tokens, weights [N, K]
lanes    `kernels.cpu.products`: tiles of sums in registers    float32, from LEAST_LANES tokens on
torch    MKL or oneDNN                                         dense weights
vnni     whole numbers, four bytes to a lane                   quantised, up to MOST_FEW tokens
amx      whole numbers, by tile registers                      quantised, up to MOST_FEW tokens
decode   float32 out of codes                                  quantised weights
=======  ====================================================  =====================

A product with quantised weights has one kernel for all numbers of tokens up to MOST_FEW: kernels round
differently, and what a token gets must not depend on how many run beside it.

Without measurements a built-in rule holds. `kernels.cpu.timing` measures, and `adopt` puts the result into
force for the sizes that it has. A choice made by hand (`fix`) goes before both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Final, Literal

from kernels.product import Form, Product

KernelName = Literal["few", "row", "pairs", "lanes", "torch", "vnni", "amx", "decode"]
Seconds = Mapping[KernelName, Sequence[float]]  # seconds of the rounds in which all took turns

MOST_FEW: Final = 16
MOST_ROW: Final = 4
LEAST_LANES: Final = 9  # fewer would waste more than half of the lanes
# Tokens that are measured. Others go by the next of them, those above the last by the last.
COUNTS: Final = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
OF_QUANTIZED: Final = (1, 4, 16)
# A kernel replaces the built-in rule's if its best time is below this part of the other's, and if it was
# faster in this part of the rounds: on a busy machine a single time says little.
MARGIN: Final = 0.8
OWN_MARGIN: Final = 0.95  # factor for a kernel that a step can be recorded with
MAJORITY: Final = 0.75


@cache
def of_dense() -> tuple[KernelName, ...]:
    """Return the kernels of dense products that this processor has."""
    from kernels.cpu.few_tile import CAN_PAIR  # numba takes a while to import

    return ("few", "row", "pairs", "lanes", "torch") if CAN_PAIR else ("few", "row", "lanes", "torch")


@cache
def of_quantized() -> tuple[KernelName, ...]:
    """Return the kernels of quantised products that this processor has."""
    from kernels.cpu import amx, bytes_tile

    found: list[KernelName] = ["vnni"] if bytes_tile.CAN_DOT else []
    return (*found, "amx", "decode") if amx.CAN_USE else (*found, "decode")


def candidates(product: Product, tokens: int) -> list[KernelName]:
    """Return the kernels that can multiply so many tokens."""
    if product.form == "quantized":
        return list(of_quantized()) if tokens <= MOST_FEW else ["decode"]
    found: list[KernelName] = []
    if tokens <= MOST_FEW:
        found.append("few")
    if product.form == "linear" and 2 <= tokens <= MOST_ROW:
        found.append("row")
    is_short = product.form == "linear" and product.dtype == "bfloat16"
    if is_short and tokens <= MOST_FEW and "pairs" in of_dense():
        found.append("pairs")
    if product.dtype == "float32" and tokens >= LEAST_LANES:
        found.append("lanes")
    return [*found, "torch"]


def counts(product: Product) -> tuple[int, ...]:
    """Return the numbers of tokens that are measured."""
    return OF_QUANTIZED if product.form == "quantized" else COUNTS


def built_in(product: Product, tokens: int) -> KernelName:
    """Return the kernel that runs without measurements."""
    return candidates(product, tokens)[0]


Choices = Mapping[Product, Mapping[int, KernelName]]


def decide(times: Mapping[Product, Mapping[int, Seconds]]) -> dict[Product, dict[int, KernelName]]:
    """Return the kernels for a model's products, by measured number of tokens.

    times: the seconds of the candidates. A step of few tokens can be recorded if none of its products is
    torch's, which saves more than torch does at one of them: torch's must save time in the step as a whole.
    """
    chosen: dict[Product, dict[int, KernelName]] = {product: {} for product in times}
    dense = {product: measured for product, measured in times.items() if product.form != "quantized"}
    for tokens in sorted({tokens for measured in dense.values() for tokens in measured}):
        rows = {product: measured[tokens] for product, measured in dense.items() if tokens in measured}
        found = {product: _decide_one(product, tokens, seconds) for product, seconds in rows.items()}
        if tokens <= MOST_FEW and "torch" in found.values():
            without = {product: _without_torch(seconds) or seconds for product, seconds in rows.items()}
            own = {product: _decide_one(product, tokens, seconds) for product, seconds in without.items()}
            if "torch" not in own.values() and _total(rows, found) >= MARGIN * _total(rows, own):
                found = own
        for product, name in found.items():
            chosen[product][tokens] = name
    for product, measured in times.items():
        if product.form == "quantized" and all(tokens in measured for tokens in OF_QUANTIZED):
            chosen[product] = dict.fromkeys(OF_QUANTIZED, _decide_for_all(measured))
    return chosen


def _decide_for_all(measured: Mapping[int, Seconds]) -> KernelName:
    """Return the kernel that loses least to the best one of each number of tokens."""
    names = set.intersection(*(set(seconds) for seconds in measured.values()))
    best = {tokens: min(map(min, seconds.values())) for tokens, seconds in measured.items()}
    return min(
        sorted(names), key=lambda name: sum(min(measured[tokens][name]) / best[tokens] for tokens in best)
    )


def _decide_one(product: Product, tokens: int, seconds: Seconds) -> KernelName:
    usual = built_in(product, tokens)
    best = min(seconds, key=lambda name: min(seconds[name]), default=usual)
    if usual not in seconds:
        return best
    margin = MARGIN if best == "torch" else OWN_MARGIN
    return best if _is_faster(seconds[best], seconds[usual], margin) else usual


def _without_torch(seconds: Seconds) -> Seconds:
    return {name: taken for name, taken in seconds.items() if name != "torch"}


def _total(rows: Mapping[Product, Seconds], names: Mapping[Product, KernelName]) -> float:
    return sum(min(rows[product][name]) for product, name in names.items())


def _is_faster(one: Sequence[float], other: Sequence[float], margin: float) -> bool:
    wins = sum(a < b for a, b in zip(one, other, strict=True))
    return min(one) < margin * min(other) and wins >= MAJORITY * len(one)


class Table:
    """The choices in force."""

    def __init__(self) -> None:
        self._fixed: tuple[KernelName, ...] = ()
        self._adopted: dict[Product, dict[int, KernelName]] = {}
        self._names: dict[tuple[Form, str, int, int], list[KernelName]] = {}

    def fix(self, names: str) -> None:
        """Run these kernels wherever they can run, or the choices if `names` is empty.

        Several names, such as one for dense and one for quantised weights, have commas between them. Raises
        ValueError for a kernel that there is not.
        """
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        there_are = (*of_dense(), *of_quantized()) if wanted else ()
        if unknown := [name for name in wanted if name not in there_are]:
            raise ValueError(
                f"no kernel {unknown[0]!r} for products on this processor; it has {', '.join(there_are)}"
            )
        self._fixed = tuple(known for known in there_are if known in wanted)
        self._names.clear()

    def fixed(self, product: Product) -> KernelName | None:
        """Return the kernel that was chosen by hand for this product with few tokens."""
        able = {name for tokens in counts(product) for name in candidates(product, tokens)}
        return next((name for name in self._fixed if name in able), None)

    def adopt(self, choices: Choices) -> None:
        """Put choices into force, beside those for other products."""
        self._adopted.update((product, dict(names)) for product, names in choices.items())
        self._names.clear()

    def forget(self) -> None:
        """Go back to the built-in rule."""
        self._fixed = ()
        self._adopted.clear()
        self._names.clear()

    def pick(self, form: Form, dtype: str, outputs: int, inputs: int, tokens: int) -> KernelName:
        key = form, dtype, outputs, inputs
        names = self._names.get(key)
        if names is None:
            names = self._names[key] = [self._find(Product(*key), n) for n in range(COUNTS[-1] + 1)]
        return names[min(tokens, COUNTS[-1])]

    def _find(self, product: Product, tokens: int) -> KernelName:
        able = candidates(product, tokens)
        for name in self._fixed:
            if name in able:
                return name
        measured = self._adopted.get(product, {})
        count = min((count for count in measured if count >= tokens), default=0)
        name = measured.get(count, able[0])
        return name if name in able else able[0]


TABLE: Final = Table()


def describe(choices: Choices) -> list[str]:
    """Return a line for each product: `linear float32 1536x512: few to 16, lanes to 256` tokens."""
    return [f"{product}: {_ranges(product, names)}" for product, names in sorted(choices.items())]


def _ranges(product: Product, measured: Mapping[int, KernelName]) -> str:
    names = [(count, measured.get(count, built_in(product, count))) for count in counts(product)]
    runs = (list(run) for _, run in groupby(names, key=lambda one: one[1]))
    return ", ".join(f"{run[-1][1]} to {run[-1][0]}" for run in runs)
