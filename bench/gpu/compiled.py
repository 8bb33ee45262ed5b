"""The Triton kernels that serving launches, compiled for GPUs that need not be there.

    python -m bench.gpu compiled [--models NAME ...] [--arch 80 ...] [--processes N]

The launches are those that a worker compiles before it serves (`worker.model.rehearsal`), for models of the
shapes of Llama 3 8B, Qwen2.5 7B and Qwen3 30B A3B in bfloat16, in all precisions and degrees up to 4. Each is
compiled with the installed Triton, and the machine code read for what it takes: registers of a thread, bytes
of stack (registers that did not fit), bytes of shared memory. A kernel that fails, spills more than
MOST_STACK_BYTES or takes more than a multiprocessor has is a problem. Writes bench/results/gpu/compiled.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from bench.common.results import parser, say
from bench.gpu.common import Found
from bench.gpu.decode import LLAMA_8B
from bus.messages import PARTS
from bus.precisions import QUANTIZED, Precision
from kernels.gpu.compiling import WARP, Specialization, compile_apart, compile_for, recorded
from kernels.registry import use_backend
from worker.model import read_config
from worker.model.config import ModelConfig
from worker.model.layout import plan_model
from worker.model.quantized_layout import plan_quantized
from worker.model.rehearsal import Rehearsal

QWEN_7B: Final = LLAMA_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
QWEN_30B_A3B: Final = LLAMA_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama-3-8b": LLAMA_8B,
    "qwen2.5-7b": QWEN_7B,
    "qwen3-30b-a3b": QWEN_30B_A3B,
}
BLOCK_TOKENS: Final = 16
MAX_TP: Final = 4
MAX_BATCHED_TOKENS: Final = 8192
PAGE_BYTES: Final = 2 << 20
REGISTERS: Final = 65536  # of a multiprocessor, and of a program
# ptxas spills a register or two where it then has room for one more program: 168 registers of 128 threads.
MOST_STACK_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU: its compute capability, multiprocessors, and most bytes of shared memory of a program.

    CUDA C++ Programming Guide, table of technical specifications per compute capability.
    """

    name: str
    arch: int
    processors: int
    shared_bytes: int

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP)


GPUS: Final = (
    Gpu("A100", 80, 108, 163 << 10),
    Gpu("H100", 90, 132, 227 << 10),
    Gpu("B200", 100, 148, 227 << 10),
)


@dataclass(frozen=True, slots=True)
class Taken:
    """The needs of a program on a multiprocessor, and what is wrong with them; empty: nothing."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    problem: str


def launches(
    config: Mapping[str, Any],
    gpu: Gpu,
    *,
    precisions: Sequence[Precision] = QUANTIZED,
    max_tp: int = MAX_TP,
) -> list[Specialization]:
    """Return what a worker on this GPU compiles for a model of this config before it serves."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        read = read_config(Path(folder))
    return launches_of(read, torch.bfloat16, gpu, precisions=precisions, max_tp=max_tp)


def launches_of(
    config: ModelConfig,
    dtype: torch.dtype,
    gpu: Gpu,
    *,
    precisions: Sequence[Precision] = QUANTIZED,
    max_tp: int = MAX_TP,
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS,
) -> list[Specialization]:
    """Return what `launches` does, of a model in this dtype."""
    plan = plan_model(config, dtype, PAGE_BYTES, max_tp)
    quantized = {
        (part, precision): half
        for precision in precisions
        for part, half in zip(PARTS, plan_quantized(config, plan, PAGE_BYTES, precision), strict=True)
    }
    rehearse = Rehearsal(
        config=config,
        plan=plan,
        quantized=quantized,
        block_tokens=BLOCK_TOKENS,
        has_kv_codes=True,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    with recorded(gpu.target, gpu.processors) as found, use_backend("cuda"):
        rehearse()
    return found


def compiled(wanted: Specialization, gpu: Gpu) -> Taken:
    """Compile for the GPU and return what a program takes."""
    try:
        kernel = compile_for(gpu.target, wanted)
    except Exception as error:  # noqa: BLE001 whatever the compiler raises is the finding
        return Taken(0, 0, 0, f"does not compile: {str(error)[-500:]}")
    registers, stack = resources(kernel.asm["cubin"])
    shared, threads = int(kernel.metadata.shared), WARP * int(kernel.metadata.num_warps)
    problems = []
    if stack > MOST_STACK_BYTES:
        problems.append(f"{stack} bytes of stack")
    if shared > gpu.shared_bytes:
        problems.append(f"{shared} bytes of shared memory, of {gpu.shared_bytes}")
    if registers * threads > REGISTERS:
        problems.append(f"{registers} registers of {threads} threads, of {REGISTERS} in all")
    return Taken(registers, stack, shared, ", ".join(problems))


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread of the kernel in this machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if not numbers:
        raise ValueError(f"cuobjdump says no registers of the kernel: {told!r}")
    return int(numbers[1]), int(numbers[2])


def measure(models: Sequence[str], gpus: Sequence[Gpu], processes: int, found: Found) -> None:
    """Put into `found` a row for each kernel, model and GPU: the most that any form of the kernel takes."""
    found.put(triton=triton.__version__)
    for gpu in gpus:
        of_models = {name: launches(MODELS[name], gpu) for name in models}
        distinct = list(dict.fromkeys(each for wanted in of_models.values() for each in wanted))
        say(f"{gpu.name}: {len(distinct)} kernels for {', '.join(models)}")
        compile_apart(distinct, gpu.target, processes)
        taken = {each: compiled(each, gpu) for each in distinct}
        for name, wanted in of_models.items():
            found.add("rows", *_rows(name, gpu, {each: taken[each] for each in wanted}))
        for each in distinct:
            if taken[each].problem:
                found.problem(f"{gpu.name}: {each.kernel} {each.constants}: {taken[each].problem}")


def _rows(model: str, gpu: Gpu, taken: Mapping[Specialization, Taken]) -> Iterator[dict[str, Any]]:
    forms: dict[str, list[Taken]] = {}
    for wanted, each in taken.items():
        name = wanted.kernel.removeprefix("kernels.gpu.").replace("_kernels.", ".").removesuffix("_kernel")
        forms.setdefault(name, []).append(each)
    for name, found in forms.items():
        yield {
            "model": model,
            "arch": gpu.arch,
            "kernel": name,
            "forms": len(found),
            "registers": max(each.registers for each in found),
            "stack_bytes": max(each.stack_bytes for each in found),
            "shared_bytes": max(each.shared_bytes for each in found),
        }


def lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table."""
    yield f"Triton {values['triton']}; the most of all forms of a kernel"
    yield f"{'model':14} {'sm':>3} {'kernel':24} {'forms':>5} {'registers':>9} {'stack':>6} {'shared':>7}"
    for row in values.get("rows", []):
        yield (
            f"{row['model']:14} {row['arch']:3d} {row['kernel']:24} {row['forms']:5d}"
            f" {row['registers']:9d} {row['stack_bytes']:6d} {row['shared_bytes']:7d}"
        )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--arch", nargs="+", type=int, choices=[gpu.arch for gpu in GPUS])
    options.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = options.parse_args()
    gpus = [gpu for gpu in GPUS if not args.arch or gpu.arch in args.arch]
    found = Found("compiled")
    measure(args.models, gpus, args.processes, found)
    found.put(is_whole=True)
    for line in lines(found.values):
        say(line)
    return 1 if found.values["problems"] else 0
