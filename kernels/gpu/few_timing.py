"""Puts the fastest kernels for products of few tokens into force, measured before a model serves.

Weights of the model's shapes come from memory, as in a step; they are not the model's own. A kernel must give
what torch's product gives, and be faster by a margin. Whatever fails leaves torch's in force, and is told.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.gpu.few import CANDIDATES, COUNTS, IN_FORCE, FewConfig, Form, Key, can_run, multiply
from kernels.gpu.timing import Call, seconds_of
from kernels.product import Product

log = logging.getLogger(__name__)

MOST_SECONDS: Final = 4.0  # for one model; what is left stays torch's
MEMORY_BYTES: Final = 256 << 20  # of weights, several times the second-level cache; larger ones stay torch's
MOST_COPIES: Final = 16
MARGIN: Final = 0.97  # of torch's time
TOLERANCE: Final = 2**-6  # of the largest output: two roundings of bfloat16

Clock = Callable[[], float]
Seconds = Callable[[Sequence[Sequence[Call]], torch.device], list[float]]


def choose(
    products: Iterable[Product],
    device: torch.device,
    seconds: Seconds = seconds_of,
    clock: Clock = time.monotonic,
) -> list[str]:
    """Measure the kernels of these products, the first ones first, and return the choices as text.

    It takes MOST_SECONDS at most.
    """
    end, told = clock() + MOST_SECONDS, list[str]()
    wanted = [each for each in dict.fromkeys(products) if each.form != "quantized"]
    try:
        memory = memory_on(device)
    except torch.OutOfMemoryError as error:
        log.warning("products of few tokens are torch's, for lack of memory to time others: %s", error)
        return told
    for tokens, product in itertools.product(COUNTS, wanted):
        if clock() > end:
            return [*told, "the others are torch's, for lack of time to measure them"]
        try:
            found = measure(product, tokens, memory, seconds)
        except Exception as error:  # noqa: BLE001 of the driver, a graph or a kernel: there is torch's
            log.warning("the product %s of %d tokens is torch's: %s", product, tokens, error)
            continue
        if found:
            told.append(_adopt(product, tokens, found))
    return told


def _adopt(product: Product, tokens: int, found: Mapping[FewConfig | None, float]) -> str:
    """Put the fastest kernel into force if it is faster by the margin, and say what was found."""
    usual, best = found[None], min(found, key=lambda config: found[config])
    key = Key(_form(product), getattr(torch, product.dtype), product.outputs, product.inputs, tokens)
    if best and found[best] < MARGIN * usual:
        IN_FORCE[key] = best
    else:
        IN_FORCE.pop(key, None)
    name = IN_FORCE.get(key, "torch")
    return f"{product} x {tokens}: {name}; best {1e6 * found[best]:.1f} us, torch {1e6 * usual:.1f}"


def memory_on(device: torch.device) -> Tensor:
    """Return the memory for weights, bfloat16 [n]. Raises torch.OutOfMemoryError."""
    memory = torch.empty(MEMORY_BYTES // 2, dtype=torch.bfloat16, device=device)
    return memory.normal_(generator=torch.Generator(device).manual_seed(0))  # finite in float16, too


def measure(
    product: Product, tokens: int, memory: Tensor, seconds: Seconds = seconds_of
) -> dict[FewConfig | None, float]:
    """Return the seconds of torch's product, None, and of each config that gives what torch gives.

    Empty if these kernels cannot multiply it. Raises RuntimeError of the driver.
    """
    weights = _weights(product, memory)
    if not weights:
        return {}
    form, device = _form(product), memory.device
    x = torch.linspace(-1, 1, tokens * product.inputs, device=device).to(weights[0].dtype)
    x = x.view(tokens, product.inputs)
    if not can_run(x, weights[0]):
        return {}
    usual = _torch(form, x, weights[0])
    right = [config for config in CANDIDATES[form] if _agrees(form, x, weights[0], config, usual)]
    ways = [[partial(_torch, form, x, weight) for weight in weights]]
    ways += [[partial(multiply, form, x, weight, None, config) for weight in weights] for config in right]
    return dict(zip((None, *right), seconds(ways, device), strict=True))


def _form(product: Product) -> Form:
    assert product.form != "quantized"
    return product.form


def _torch(form: Form, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) if form == "linear" else torch.matmul(x, weight)


def _agrees(form: Form, x: Tensor, weight: Tensor, config: FewConfig, usual: Tensor) -> bool:
    made, wanted = multiply(form, x, weight, None, config).float(), usual.float()
    error = float((made - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
    if error <= TOLERANCE:
        return True
    log.warning("%s of a %s product is off by %.3g and stays out of force", config, form, error)
    return False


def _weights(product: Product, memory: Tensor) -> list[Tensor]:
    """Return as many weights of this shape as the memory holds, in which any 16 bits are a short float."""
    dtype, elements = getattr(torch, product.dtype), product.outputs * product.inputs
    if dtype.itemsize != memory.itemsize or not elements:
        return []
    shape = (product.outputs, product.inputs)
    shape = shape if product.form == "linear" else shape[::-1]
    count = min(MOST_COPIES, memory.numel() // elements)
    return [memory[i * elements :][:elements].view(dtype).view(shape) for i in range(count)]
