"""Products by the library humming beside the own ones on a GPU: each held against its oracle, timed in turns.

    python -m bench.gpu humming [--device cpu]

Weights of an 8B layer in groups of 64 with zeros, and bfloat16 tokens. humming takes codes packed in its own
order, made once here from the own codes (`repack_us`), and scales in bfloat16, which rounds float16 ones. It
compiles a kernel for every matrix and range of tokens by NVRTC: each matrix is tried first in a process of
its own, all at once, which ends after READY_S with whatever it compiles; the kernels of the others are then
on disk. The kit has humming with `--with humming`. `--device cpu` runs the own small products alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.gpu.attention import try_ways
from bench.gpu.card import bandwidth
from bench.gpu.common import Found, run_alone
from bench.gpu.sweep import COLD_BYTES, ERROR, judged_in_turns, weight_of
from kernels import QuantizedWeight
from kernels.packing import packed_size, unpack

LIMIT_S = 100.0  # for all; cases that are left are not measured
READY_S = 75.0  # for compiling
PRODUCTS = ("4 4096 28672", "4 14336 4096", "8 4096 28672", "3 4096 28672")  # bits, inputs, outputs
TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048)
CPU_PRODUCTS, CPU_TOKENS = ("4 256 64",), (1, 17)


def measure(device: torch.device, found: Found) -> None:
    is_gpu = device.type == "cuda"
    deadline = time.monotonic() + LIMIT_S
    ready = _ready(device, found)
    reads = bandwidth(device)
    for product in PRODUCTS if is_gpu else CPU_PRODUCTS:
        for row in _rows(device, product, product in ready, reads, found):
            if row["error"] > ERROR or not row["is_steady"]:
                found.problem(f"{row}")
            found.add("rows", row)
            if time.monotonic() > deadline:
                found.put(ended=f"after {LIMIT_S:.0f} s, with cases left out")
                return


# --------------------------------------------------------------------------- humming


@dataclass(frozen=True, slots=True)
class Humming:
    """A weight in humming's order, and the kernels that it chooses for numbers of tokens."""

    layer: Any
    configs: dict[int, Any]

    @classmethod
    def of(cls, weight: QuantizedWeight, configs: dict[int, Any]) -> Humming:
        """Pack a weight of one unit again; configs: those that a weight of these sizes has, at first none."""
        layers: Any = importlib.import_module("humming.layer")
        pack: Any = importlib.import_module("humming.ops").pack_weight
        layer = layers.HummingLayer(
            shape_n=weight.num_outputs,
            shape_k=weight.num_inputs,
            weight_config={"dtype": f"uint{weight.bits}", "group_size": weight.group, "has_zero_point": True},
            torch_dtype=torch.bfloat16,
        ).to(weight.codes.device)
        codes, zeros = unpack(weight.codes[0], weight.bits), weight.zeros[0].t()
        layer.load_from_tensors(
            {
                "weight": pack(codes.int().contiguous(), weight.bits),
                "weight_scale": weight.scales[0].bfloat16(),
                "zero_point": pack(zeros.int().contiguous(), weight.bits).t().contiguous(),
            }
        )
        layer.transform()
        return cls(layer, configs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        if tokens not in self.configs:
            tune: Any = importlib.import_module("humming.tune")
            self.configs[tokens] = tune.get_heuristics_config(self.layer.humming_config, tokens)
        made: torch.Tensor = self.layer(x, tuning_config=self.configs[tokens])
        return made


def _ready(device: torch.device, found: Found) -> set[str]:
    """Return the products that humming ran in a process of their own; record why it did not run others."""
    if device.type != "cuda":
        found.put(without="humming runs on GPUs")
        return set()
    if importlib.util.find_spec("humming") is None:
        found.put(without="humming is not installed: pack the kit with --with humming")
        return set()
    tried = try_ways(PRODUCTS, READY_S, try_product)
    found.put(tried=tried)
    return {product for product, told in tried.items() if "problem" not in told}


def try_product(product: str, told: Connection) -> None:
    """Multiply once with every number of tokens, on the GPU; the kernels compile at once."""
    os.setsid()  # compilers join its group
    try:
        began = time.monotonic()
        bits, inputs, outputs = map(int, product.split())
        device = torch.device("cuda", 0)
        one = Humming.of(weight_of(inputs, outputs, bits, device), {})
        imported = time.monotonic()

        def run(tokens: int) -> None:
            torch.cuda.set_device(device)
            one(torch.zeros(tokens, inputs, dtype=torch.bfloat16, device=device))

        with ThreadPoolExecutor(len(TOKENS)) as threads:
            list(threads.map(run, TOKENS))
        torch.cuda.synchronize()
        compile_s = time.monotonic() - imported
        told.send({"import_s": round(imported - began, 1), "first_call_s": round(compile_s, 1)})
    except Exception as problem:  # noqa: BLE001 whatever a compiler or an unknown version refuses
        told.send({"problem": f"{type(problem).__name__}: {str(problem)[-300:]}"})


# --------------------------------------------------------------------------- measuring


def _rows(
    device: torch.device, product: str, is_ready: bool, reads: float, found: Found
) -> Iterator[dict[str, Any]]:
    """Yield a row of the own product and of humming's for each number of tokens."""
    bits, inputs, outputs = map(int, product.split())
    nbytes = packed_size(inputs, bits) * outputs
    copies = max(4, -(-COLD_BYTES // nbytes)) if device.type == "cuda" else 1
    weights = [weight_of(inputs, outputs, bits, device) for _ in range(copies)]
    repacked: list[Humming] = []
    if is_ready:
        configs: dict[int, Any] = {}
        for weight in weights:
            began = time.monotonic()
            repacked.append(Humming.of(weight, configs))
            torch.cuda.synchronize(device)
            repack_us = round(1e6 * (time.monotonic() - began))
        found.add("repacked", {"product": product, "repack_us": repack_us})
    full = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) for _ in range(2)]
    exact = kernels.dequantize(weights[0]).t()
    for tokens in TOKENS if device.type == "cuda" else CPU_TOKENS:
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device)
        ways = {"own": [partial(kernels.quantized_linear, x, weight) for weight in weights]}
        if repacked:
            ways["humming"] = [partial(one, x) for one in repacked]
        dense = [partial(kernels.linear.reference, x, one) for one in full]
        dense_us, made = judged_in_turns(device, ways, x.float() @ exact, dense)
        for way, judgement in made.items():
            yield {
                "bits": bits,
                "inputs": inputs,
                "outputs": outputs,
                "tokens": tokens,
                "floor_us": round(1e6 * nbytes / reads, 1),
                "dense_us": dense_us,
                "way": way,
            } | judgement


# --------------------------------------------------------------------------- the card


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what the first calls took or why they did not run, then a line for each case."""
    if without := found.get("without"):
        yield f"humming: {without}"
    for product, told in found.get("tried", {}).items():
        if problem := told.get("problem"):
            yield f"humming: {product} did not run: {problem}"
        else:
            yield f"humming: {product} packed in {told['import_s']} s, compiled in {told['first_call_s']} s"
    for row in found.get("repacked", []):
        yield f"humming: packing {row['product']} again takes {row['repack_us']} us"
    cases: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in found.get("rows", []):
        cases[row["bits"], row["inputs"], row["outputs"], row["tokens"]].append(row)
    for (bits, inputs, outputs, tokens), case in cases.items():
        dense = case[0]["dense_us"]
        yield f"int{bits} {inputs} x {outputs} x {tokens:4d} tokens, bfloat16 {dense:.1f} us: " + ", ".join(
            f"{row['way']} {row['us']:.1f} us ({row['us'] / dense:.2f})" for row in case
        )
    if ended := found.get("ended"):
        yield f"humming: {ended}"


def main() -> int:
    return run_alone(__doc__, "humming", measure, lines)
