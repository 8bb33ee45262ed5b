"""Names of the products of a model, for the choice of a kernel by measurement."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Form = Literal["linear", "linear_t", "quantized"]


class Product(NamedTuple):
    """A product with weights [N, K] ("linear"), [K, N] ("linear_t") or codes of [N, K] ("quantized").

    The dtype of codes has their bits and the inputs of a group: int4/64.
    """

    form: Form
    dtype: str
    outputs: int
    inputs: int

    @classmethod
    def quantized(cls, bits: int, group: int, outputs: int, inputs: int) -> Product:
        return cls("quantized", f"int{bits}/{group}", outputs, inputs)

    @property
    def coding(self) -> tuple[int, int]:
        """The bits of codes and the inputs of a group."""
        bits, group = self.dtype.removeprefix("int").split("/")
        return int(bits), int(group)

    def __str__(self) -> str:
        return " ".join((self.form, self.dtype, f"{self.outputs}x{self.inputs}"))


def parse_product(text: str) -> Product:
    """Return the product that `str` wrote. Raises ValueError."""
    form, dtype, sizes = text.split(" ")
    outputs, inputs = map(int, sizes.split("x"))
    if form not in get_args(Form):
        raise ValueError(f"{form!r} is no form of a product")
    return Product(form, dtype, outputs, inputs)  # type: ignore[arg-type]  # mypy does not narrow by `in`
