"""The kernel for each kind of product, sizes and number of tokens: a table; nothing is timed here.

=======  ====================================================  =====================
kernel   what it is                                            runs
=======  ====================================================  =====================
few      reads the weights once, four rows at a time           up to MOST_FEW tokens
row      the same, row by row                                  2 to MOST_ROW tokens, weights [N, K]
lanes    `kernels.cpu.products`: tiles of sums in registers    float32, from LEAST_LANES tokens on
torch    MKL or oneDNN                                         always
=======  ====================================================  =====================

Without measurements a built-in rule holds. `kernels.cpu.timing` measures, and `adopt` puts the result into
force for the sizes that it has. A choice made by hand (`fix`) goes before both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, Literal, NamedTuple

Form = Literal["linear", "linear_t"]
KernelName = Literal["few", "row", "lanes", "torch"]
Seconds = Mapping[KernelName, Sequence[float]]  # seconds of the rounds in which all took turns

KERNELS: Final[tuple[KernelName, ...]] = ("few", "row", "lanes", "torch")
MOST_FEW: Final = 16
MOST_ROW: Final = 4
LEAST_LANES: Final = 9  # fewer would waste more than half of the lanes
# Tokens that are measured. Others go by the next of them, those above the last by the last.
COUNTS: Final = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
# A kernel replaces the built-in rule's if its best time is below this part of the other's, and if it was
# faster in this part of the rounds: on a busy machine a single time says little.
MARGIN: Final = 0.8
OWN_MARGIN: Final = 0.95  # factor for a kernel that a step can be recorded with
MAJORITY: Final = 0.75


class Product(NamedTuple):
    """A product with weights [N, K] ("linear") or [K, N] ("linear_t")."""

    form: Form
    dtype: str
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return " ".join((self.form, self.dtype, f"{self.outputs}x{self.inputs}"))


def parse_product(text: str) -> Product:
    """Return the product that `str` wrote. Raises ValueError."""
    form, dtype, sizes = text.split(" ")
    outputs, inputs = map(int, sizes.split("x"))
    if form not in ("linear", "linear_t"):
        raise ValueError(f"{form!r} is no form of a product")
    return Product(form, dtype, outputs, inputs)  # type: ignore[arg-type]  # mypy does not narrow by `in`


def candidates(product: Product, tokens: int) -> list[KernelName]:
    """Return the kernels that can multiply so many tokens."""
    found: list[KernelName] = []
    if tokens <= MOST_FEW:
        found.append("few")
    if product.form == "linear" and 2 <= tokens <= MOST_ROW:
        found.append("row")
    if product.dtype == "float32" and tokens >= LEAST_LANES:
        found.append("lanes")
    return [*found, "torch"]


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
    for tokens in sorted({tokens for measured in times.values() for tokens in measured}):
        rows = {product: measured[tokens] for product, measured in times.items() if tokens in measured}
        found = {product: _decide_one(product, tokens, seconds) for product, seconds in rows.items()}
        if tokens <= MOST_FEW and "torch" in found.values():
            without = {product: _without_torch(seconds) or seconds for product, seconds in rows.items()}
            own = {product: _decide_one(product, tokens, seconds) for product, seconds in without.items()}
            if "torch" not in own.values() and _total(rows, found) >= MARGIN * _total(rows, own):
                found = own
        for product, name in found.items():
            chosen[product][tokens] = name
    return chosen


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
        self._fixed: KernelName | None = None
        self._adopted: dict[Product, dict[int, KernelName]] = {}
        self._names: dict[tuple[Form, str, int, int], list[KernelName]] = {}

    def fix(self, name: str) -> None:
        """Run this kernel wherever it can run, or the choices if `name` is empty.

        Raises ValueError for a kernel that there is not.
        """
        if name and name not in KERNELS:
            raise ValueError(f"no kernel {name!r} for products here; there are {', '.join(KERNELS)}")
        self._fixed = next((known for known in KERNELS if known == name), None)
        self._names.clear()

    @property
    def fixed(self) -> KernelName | None:
        """The kernel that was chosen by hand."""
        return self._fixed

    def adopt(self, choices: Choices) -> None:
        """Put choices into force, beside those for other products."""
        self._adopted.update((product, dict(names)) for product, names in choices.items())
        self._names.clear()

    def forget(self) -> None:
        """Go back to the built-in rule."""
        self._fixed = None
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
        if self._fixed in able:
            return self._fixed
        measured = self._adopted.get(product, {})
        count = next(count for count in COUNTS if count >= tokens)
        name = measured.get(count, built_in(product, tokens))
        return name if name in able else able[0]


TABLE: Final = Table()


def describe(choices: Choices) -> list[str]:
    """Return a line for each product: `linear float32 1536x512: few to 16, lanes to 96` tokens."""
    return [f"{product}: {_ranges(product, names)}" for product, names in sorted(choices.items())]


def _ranges(product: Product, measured: Mapping[int, KernelName]) -> str:
    names = [(count, measured.get(count, built_in(product, count))) for count in COUNTS]
    runs = (list(run) for _, run in groupby(names, key=lambda one: one[1]))
    return ", ".join(f"{run[-1][1]} to {run[-1][0]}" for run in runs)
