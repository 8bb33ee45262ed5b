"""Checks and numbers of a GPU: kernels, pages, the engine, groups, decoding, products and estimates.

    python -m bench.gpu [--skip-decode]        (make gpu)

Kernels are compared with oracles, pages with their tests, the engine with transformers, decoding with the
memory's bandwidth, products with quantised weights with dense ones, and estimates from two layers of an 8B
model with the whole model. Workers that share the GPU change their tensor parallelism.

Needs Python with torch and triton on a CUDA machine, and nothing of the service around the engine: no Redis,
no web framework. The pages are tested if pytest and hypothesis are installed; the engine is checked and
measured if transformers, safetensors and cuda-bindings are, groups if msgspec and pydantic are too, and
estimates if redis and psutil are as well. Prints a card, writes bench/results/gpu/{device}.json and ends in
the same JSON on one line; exit status 1 if a check failed. Without CUDA it says so and exits 0.

The floor of a decode step is the time to read every weight but the embedding, and every cached key and value,
at the bandwidth that copying a gigabyte reaches in the same run.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common.results import RESULTS, ROOT, parser, say

MEMORY_TESTS = (
    "tests/worker/memory/test_memory_pool.py",
    "tests/worker/memory/test_memory_sequences.py",
    "tests/worker/memory/test_kv_cache.py",
    "tests/worker/memory/test_pinned.py",
)
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
BATCHES = ((1, 512), (16, 512), (64, 512), (64, 2048))  # sequences, tokens of context
TIMED_STEPS = 32
GIB = 1024**3


# --------------------------------------------------------------------------- checks


def check_kernels() -> list[str]:
    """Return the checks that failed."""
    from bench.kernels.checks import checks, failures

    say(f"kernels: {sum(1 for _ in checks('cuda', 'cuda'))} checks against the oracles")
    return [f"{name}: {problem}" for name, problem in failures("cuda", "cuda") if problem]


def is_there(what: str, *modules: str) -> bool:
    """Return whether the modules can be imported; report what is left out if not."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as missing:
            say(f"{what}: left out, {missing.name or name} is not installed")
            return False
    return True


def check_memory() -> list[str]:
    """Run the GPU tests of pages and KV caches in a process, since a stray access would end this one."""
    if not is_there("memory", "pytest", "hypothesis", "cuda.bindings"):
        return []
    say("memory: the pages' tests on the GPU")
    # Without the project's settings and fixtures: those need the service's packages.
    bare = ("--noconftest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *bare, *MEMORY_TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    say(ran.stdout[-4000:] + ran.stderr[-1000:])
    return [] if ran.returncode == 0 else [f"memory: pytest ended with {ran.returncode}"]


def check_engine() -> list[str]:
    """Compare greedy output of tiny random models of every family with transformers, token for token."""
    from bench.common.oracles import FAMILIES, make_oracle

    say(f"engine: greedy output of {len(FAMILIES)} tiny models against transformers")
    problems = []
    for family in FAMILIES:
        oracle = make_oracle(family).cuda()
        with tempfile.TemporaryDirectory() as folder:
            oracle.save_pretrained(folder)
            problems += [f"{family}: {problem}" for problem in _against(oracle, Path(folder))]
    return problems


def _against(oracle: Any, folder: Path) -> Iterator[str]:
    import torch

    from bench.common.engines import INSTANCE, run_prompts

    prompts = [[(7 * i + 3 * n) % 200 for i in range(n)] for n in (1, 5, 40, 17)]
    # A chunk of 24 tokens splits the longest prompt and mixes prefills with decodes.
    engine = make_engine(folder, torch.float32, "safetensors", 1024, max_num_batched_tokens=24)
    _, outputs = run_prompts(engine, prompts, num_out=24)
    engine.remove_instance(INSTANCE).kv.pool.close()  # now, not when the garbage is collected
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device="cuda")
        made = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        expected = made[0, len(prompt) :].tolist()
        if outputs[i] != expected:
            yield f"prompt of {len(prompt)} tokens: {outputs[i]} instead of {expected}"


def transform_found() -> dict[str, Any]:
    """Measure groups; return nothing if something is not installed."""
    if not is_there(
        "tensor parallelism", "transformers", "safetensors", "cuda.bindings", "msgspec", "pydantic"
    ):
        return {}
    import torch

    from bench.gpu import transform as gpu_transform

    say("tensor parallelism: workers that share the GPU come together and part")
    return gpu_transform.measure(torch.device("cuda", torch.cuda.current_device()), gpu_transform.GPU)


def fingerprint_found() -> dict[str, Any]:
    """Measure estimates; return nothing if something is not installed, only `problems` if it fails."""
    if not is_there("estimates", "cuda.bindings", "redis", "msgspec", "pydantic", "bench.gpu.fingerprint"):
        return {}
    import torch

    from bench.gpu import fingerprint as gpu_fingerprint

    say("estimates: two layers of an 8B model are measured, and then the whole")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        return gpu_fingerprint.measure(device, gpu_fingerprint.GPU)
    except Exception as error:  # noqa: BLE001 this comes last, and what was measured before is kept
        return {"problems": [f"estimates: {error!r}"]}


def make_engine(folder: Path, dtype: Any, load_format: Any, budget_mib: int, **shape: Any) -> Any:
    """Return an engine that serves the folder on the GPU."""
    import torch

    from bench.common.engines import EngineShape, load_engine

    device = torch.device("cuda", torch.cuda.current_device())
    return load_engine(folder, EngineShape(**shape), budget_mib, device, dtype, load_format)


# --------------------------------------------------------------------------- decoding


def copy_bandwidth() -> float:
    """Return the bytes per second, read plus written, of copying 1 GiB, in the best of 10."""
    import torch

    from bench.gpu.common import event_seconds

    source, target = (torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * GIB / event_seconds(lambda: target.copy_(source), rounds=10)


def bytes_of_a_step(num_seqs: int, context: float) -> float:
    """Return the bytes that a decode step of the 8B shape reads: weights but the embedding, keys, values."""
    c = LLAMA_8B
    heads = (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"]
    attention = c["hidden_size"] * (heads + c["num_attention_heads"] * c["head_dim"])
    layer = attention + 3 * c["hidden_size"] * c["intermediate_size"]
    weights = c["num_hidden_layers"] * layer + c["hidden_size"] * c["vocab_size"]
    cached = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * context * num_seqs
    return float(2 * (weights + cached))


def decode_rows(bandwidth: float) -> list[dict[str, float]]:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        say("decode: loading 16 GB of random weights")
        memory = int(torch.cuda.mem_get_info()[0] * 0.85)
        engine = make_engine(
            Path(folder), torch.bfloat16, "dummy", memory >> 20, max_num_seqs=64, max_num_batched_tokens=8192
        )
    rows = [_decode(engine, num_seqs, context, bandwidth) for num_seqs, context in BATCHES]
    engine.remove_instance("bench").kv.pool.close()  # now, since another model needs the memory
    return rows


def _decode(engine: Any, num_seqs: int, context: int, bandwidth: float) -> dict[str, float]:
    import torch

    from bench.common.engines import INSTANCE, greedy, timed
    from bench.gpu.common import device_clock

    warm = 8
    for s in range(num_seqs):
        prompt = [(i * 31 + s) % 1000 for i in range(context)]
        engine.submit(INSTANCE, greedy(str(s), prompt, TIMED_STEPS + 2 * warm + num_seqs))
    begun: set[str] = set()
    while len(begun) < num_seqs:
        begun |= {
            o.request.request_id for result in engine.step() for o in result.outputs if o.delta.token_ids
        }
    for _ in range(warm):
        engine.step()

    def run_steps() -> None:
        for _ in range(TIMED_STEPS):
            engine.step()

    seconds = timed(run_steps, device_clock(torch.device("cuda"))) / TIMED_STEPS
    engine.cancel([str(i) for i in range(num_seqs)])
    floor = bytes_of_a_step(num_seqs, context + warm + TIMED_STEPS / 2) / bandwidth
    return {
        "sequences": num_seqs,
        "context": context,
        "step_ms": seconds * 1000,
        "floor_ms": floor * 1000,
        "ratio": seconds / floor,
        "tokens_per_second": num_seqs / seconds,
    }


# --------------------------------------------------------------------------- the card


def report(card: dict[str, Any]) -> None:
    from bench.gpu import products as gpu_products

    say()
    say(f"{card['device']}, torch {card['torch']}, triton {card['triton']}")
    say(f"copy bandwidth {card['bandwidth_gbps']:.0f} GB/s")
    for row in card["decode"]:
        say(
            f"decode {row['sequences']:3d} x {row['context']:5d}: {row['step_ms']:7.2f} ms a step, floor "
            f"{row['floor_ms']:6.2f} ms, ratio {row['ratio']:.2f}, {row['tokens_per_second']:8.0f} tokens/s"
        )
    for row in card["quantized"]:
        say(gpu_products.line(row))
    if card["transform"]:
        from bench.gpu import transform as gpu_transform

        for text in gpu_transform.lines(card["transform"]):
            say(text)
    if card["estimates"]:
        from bench.gpu import fingerprint as gpu_fingerprint

        for text in gpu_fingerprint.lines(card["estimates"]):
            say(text)
    for problem in card["problems"]:
        say(f"FAILED {problem}")
    say(f"{len(card['problems'])} checks failed")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--skip-decode", action="store_true", help="without the 8B model, which needs 20 GB")
    args = options.parse_args()
    try:
        import torch
    except ImportError:
        say("no torch in this Python: set PYTHON to one that has torch and triton; nothing was run")
        return 0
    if not torch.cuda.is_available():
        say("no CUDA device here: nothing was run")
        return 0
    import triton

    from bench.gpu import products as gpu_products

    problems = check_kernels() + check_memory()
    has_engine = is_there("engine and decoding", "transformers", "safetensors", "cuda.bindings")
    if has_engine:
        problems += check_engine()
    transform = transform_found()
    problems += transform.pop("problems", [])
    bandwidth = copy_bandwidth()
    decode = decode_rows(bandwidth) if has_engine and not args.skip_decode else []
    quantized = gpu_products.quantized_rows(bandwidth)
    estimates = {} if args.skip_decode else fingerprint_found()
    problems += estimates.pop("problems", [])
    card = {
        "bench": "gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bandwidth_gbps": bandwidth / 1e9,
        "decode": decode,
        "quantized": quantized,
        "transform": transform,
        "estimates": estimates,
        "problems": problems,
    }
    report(card)
    folder = RESULTS / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", str(card["device"]).lower()).strip("-")
    (folder / f"{name}.json").write_text(json.dumps(card, indent=2) + "\n")
    say(json.dumps(card))
    return 1 if problems else 0
