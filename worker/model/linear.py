"""The linear maps of a layer: dense or quantised, behind one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat

import torch

from kernels import (
    QuantizedWeight,
    Routing,
    grouped_linear,
    grouped_quantized_linear,
    linear,
    linear_t,
    quantized_linear,
    stacked_linear,
    stacked_linear_t,
    steady_linear,
    take_columns,
)
from kernels.product import Form, Product


class Linear:
    """x [T, num_inputs] times a matrix, plus a bias if there is one.

    The result is [T, num_outputs], whose outputs may be dimensions of their own.
    """

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device) -> None:
        self.num_inputs, self.num_outputs, self.device = num_inputs, num_outputs, device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def dense(self) -> Iterator[tuple[Form, torch.Tensor]]:
        """Yield the dense matrices, each with the form of its product."""
        yield from ()

    def products(self) -> Iterator[Product]:
        """Yield the products (`kernels.choose_products`)."""
        yield from (dense_product(form, weight) for form, weight in self.dense())


def dense_product(form: Form, weight: torch.Tensor) -> Product:
    outputs, inputs = weight.t().shape if form == "linear_t" else weight.shape
    return Product(form, str(weight.dtype).removeprefix("torch."), outputs, inputs)


class DenseLinear(Linear):
    """x times weight [N, K] transposed, plus bias [N]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.device)
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def dense(self) -> Iterator[tuple[Form, torch.Tensor]]:
        yield "linear", self.weight


class SteadyLinear(DenseLinear):
    """x times weight [N, K] transposed, plus bias [N]: the same bits on all workers.

    It leaves no kernel to choose, so it has no products.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return steady_linear(x, self.weight, self.bias)

    def dense(self) -> Iterator[tuple[Form, torch.Tensor]]:
        yield from ()


class StackedLinear(Linear):
    """x times each of weights [M, N, K] transposed, at any stride between the matrices: [T, M, N].

    bias: [M * N] or None.
    """

    def __init__(self, weights: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weights.shape[2], weights.shape[0] * weights.shape[1], weights.device)
        self.weights, self.bias = weights, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = stacked_linear(x, self.weights)
        return made if self.bias is None else made.add_(self.bias.view(made.shape[1:]))

    def dense(self) -> Iterator[tuple[Form, torch.Tensor]]:
        for weight in self.weights:
            yield "linear", weight


class TransposedLinear(Linear):
    """x times weight [K, N], plus bias [N]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], weight.device)
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = linear_t(x, self.weight)
        return made if self.bias is None else made.add_(self.bias)

    def dense(self) -> Iterator[tuple[Form, torch.Tensor]]:
        yield "linear_t", self.weight


class StackedTransposedLinear(Linear):
    """The sum of parts of x times weights [M, K, N], at any stride between the matrices, plus bias [N].

    x is [T, M * K], or [T, M, K] with the last dimension contiguous.
    """

    def __init__(self, weights: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weights.shape[0] * weights.shape[1], weights.shape[2], weights.device)
        self.weights, self.bias = weights, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = stacked_linear_t(x if x.dim() == 3 else x.unflatten(1, self.weights.shape[:2]), self.weights)
        return made if self.bias is None else made.add_(self.bias)

    def dense(self) -> Iterator[tuple[Form, torch.Tensor]]:
        for weight in self.weights:
            yield "linear_t", weight


class QuantizedLinear(Linear):
    """x times a quantised weight, plus bias [N]; x is padded to the weight's whole tiles of inputs.

    order: int32 [K] or None, the input that each of the weight's inputs is.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, order: torch.Tensor | None = None
    ) -> None:
        super().__init__(weight.num_inputs, weight.num_outputs, weight.codes.device)
        self.weight, self.bias, self.order = weight, bias, order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(self.arranged(x), self.weight, self.bias)

    def arranged(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as the weight takes it: padded, and in the order of its inputs."""
        x = self.weight.padded(x)
        return x if self.order is None else take_columns(x, self.order)

    def products(self) -> Iterator[Product]:
        yield Product.quantized(self.weight.bits, self.weight.group, self.num_outputs, self.num_inputs)


class ObservedLinear(Linear):
    """Another linear map, whose inputs go to `observe` first."""

    def __init__(self, inner: Linear, observe: Callable[[torch.Tensor], None]) -> None:
        super().__init__(inner.num_inputs, inner.num_outputs, inner.device)
        self._inner, self._observe = inner, observe

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._observe(x)
        return self._inner(x)


class GroupedLinear:
    """The same map of all experts of a rank; a call multiplies each pair by the matrix of its expert."""

    def __call__(self, x: torch.Tensor, routing: Routing, is_by_place: bool = False) -> torch.Tensor:
        """Run x [T, K], or [P, K] if it is by place, to [P, N] in the order of the places."""
        raise NotImplementedError

    @property
    def linears(self) -> list[Linear]:
        """The map of each expert."""
        raise NotImplementedError


class GroupedDense(GroupedLinear):
    """Maps by weights [E, N, K], plus bias [E, N]."""

    def __init__(self, weights: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weights, self.bias = weights, bias

    def __call__(self, x: torch.Tensor, routing: Routing, is_by_place: bool = False) -> torch.Tensor:
        return grouped_linear(x, self.weights, routing, is_by_place, self.bias)

    @property
    def linears(self) -> list[Linear]:
        return list(map(DenseLinear, self.weights, repeat(None) if self.bias is None else self.bias))


class GroupedQuantized(GroupedLinear):
    """Maps by a quantised weight whose units are the experts' matrices, plus bias [E, N]."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor, routing: Routing, is_by_place: bool = False) -> torch.Tensor:
        return grouped_quantized_linear(x, self.weight, routing, is_by_place, self.bias)

    @property
    def linears(self) -> list[Linear]:
        return list(
            map(QuantizedLinear, self.weight.matrices(), repeat(None) if self.bias is None else self.bias)
        )


def outputs_of(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    """Return these outputs of every unit."""
    codes, scales, zeros = weight.codes[:, rows], weight.scales[:, rows], weight.zeros[:, rows]
    return replace(weight, codes=codes, scales=scales, zeros=zeros)


def inputs_of(weight: QuantizedWeight, columns: slice) -> QuantizedWeight:
    """Return these inputs of every unit; they must be whole tiles and groups."""
    of_codes = slice(columns.start * weight.bits // 8, columns.stop * weight.bits // 8)
    of_groups = slice(columns.start // weight.group, columns.stop // weight.group)
    return replace(
        weight,
        codes=weight.codes[..., of_codes],
        scales=weight.scales[..., of_groups],
        zeros=weight.zeros[..., of_groups],
        input_scale=None if weight.input_scale is None else weight.input_scale[columns],
    )
