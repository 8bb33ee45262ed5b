"""Make an engine core from a model folder, piece by piece; needs no settings and no Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

import torch

import kernels
from bus.messages import Part, SamplingParams
from bus.precisions import Precision
from worker.engine.core import EngineCore
from worker.engine.grammars import GrammarCompiler
from worker.engine.recorded_batches import recorded_batches
from worker.engine.sequence import Limits, own_request
from worker.engine.stats import Stats
from worker.memory import CpuBackend, KVCache, PagePool
from worker.model import Model, ModelError
from worker.model.cut import heads_of
from worker.model.layout import RangePlan, degrees
from worker.model.rehearsal import Rehearsal
from worker.model.shard import Shard

MIB = 1024 * 1024
CPU_PAGE_BYTES, CUDA_PAGE_BYTES = 64 * 1024, 2 * MIB
# Where no degree divides the weights, so that large pages need no padding. The driver takes as long for a
# large page as for a small one: on an H200 176 of 2 MiB are mapped in 5.2 ms and unmapped in 3.4, the same
# bytes in pages of 8 MiB in 1.3 and 1.0.
CUDA_ALONE_PAGE_BYTES = 8 * MIB
CPU_BUDGET_BYTES = 2048 * MIB
CUDA_BUDGET_SHARE = 0.9  # share of the free memory; the rest is for activations and workspace


def page_bytes_of(device: torch.device, max_tp: int) -> int:
    """Return the size of a page of a worker whose weights are laid out for degrees up to `max_tp`."""
    if device.type == "cpu":
        return CPU_PAGE_BYTES
    return CUDA_ALONE_PAGE_BYTES if max_tp == 1 else CUDA_PAGE_BYTES


def make_pool(device: torch.device, budget_bytes: int = 0, page_bytes: int = 0) -> PagePool:
    """Make the device's page pool; zeros choose the defaults. Raises ValueError and MappingFailed."""
    if device.type == "cpu":
        return PagePool(CpuBackend(page_bytes or CPU_PAGE_BYTES), budget_bytes or CPU_BUDGET_BYTES)
    from worker.memory.cuda import CudaBackend  # cuda-bindings exist only where CUDA does

    backend = CudaBackend(device, page_bytes or CUDA_PAGE_BYTES)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    beside = ThreadPoolExecutor(1, "pages")
    return PagePool(backend, budget_bytes or int(free_bytes * CUDA_BUDGET_SHARE), beside)


def served_context(model: Model, max_model_len: int) -> int:
    """Return the tokens of the longest sequence to serve; 0: as long as the model's config allows.

    Raises ModelError if that is longer than the config allows.
    """
    longest = model.config.max_position_embeddings
    if max_model_len > longest:
        raise ModelError(
            f"{model.config.folder}: max_model_len is {max_model_len}, the model's context ends at {longest}"
        )
    return max_model_len or longest


def served_limits(model: Model, max_model_len: int) -> dict[str, int]:
    """Return what `Limits` has of a model that is served up to `max_model_len` (as `served_context`)."""
    return {
        "max_model_len": served_context(model, max_model_len),
        "short_context": model.config.short_context,
        "short_rope_row": model.config.max_position_embeddings,
    }


def make_cache(pool: PagePool, model: Model, limits: Limits, owner: str) -> KVCache:
    """Make a KV cache without pages, with addresses for all blocks that the pool could give it."""
    config = model.config
    block_bytes = config.kv_block_bytes(limits.block_tokens, model.dtype, limits.kv_dtype)
    return KVCache(
        pool,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=limits.block_tokens,
        dtype=model.dtype,
        max_blocks=max(1, pool.num_pages * pool.page_bytes // block_bytes),
        owner=owner,
        precision=limits.kv_dtype,
    )


def useful_pages(cache: KVCache, model: Model, limits: Limits) -> int:
    """Return the pages, of all layers, with which every sequence could be as long as it may."""
    return model.config.num_layers * cache.pages_for(min(useful_blocks(limits), cache.max_blocks))


def useful_blocks(limits: Limits) -> int:
    """Return the KV blocks with which every sequence could be as long as it may."""
    return limits.max_num_seqs * -(-limits.max_model_len // limits.block_tokens)


def cache_text(cache: KVCache, limits: Limits) -> str:
    """Return the size of a filled cache, and the limit that keeps it from the free pages, for the log."""
    text = f"{cache.num_blocks} KV blocks of {limits.block_tokens} tokens"
    room = cache.blocks_in(cache.pages_per_layer + cache.growable_pages)
    if cache.num_blocks < useful_blocks(limits) or room <= cache.num_blocks:
        return text
    return (
        f"{text}: {limits.max_num_seqs} sequences (max_num_seqs) of {limits.max_model_len} tokens "
        f"(max_model_len) use no more; {room} blocks would fit"
    )


def fair_shares(free: int, useful: Seq[int]) -> list[int]:
    """Divide pages equally among models; what one cannot use goes to the others, and the rest stays free."""
    shares = [0] * len(useful)
    by_appetite = sorted(range(len(useful)), key=lambda i: useful[i])
    for position, i in enumerate(by_appetite):
        shares[i] = min(useful[i], free // (len(useful) - position))
        free -= shares[i]
    return shares


def instance_of(
    instance_id: str,
    model: Model,
    cache: KVCache,
    limits: Limits,
    grammars: GrammarCompiler | None = None,
) -> EngineCore:
    """Make an engine core whose kernels are compiled. grammars: None where no request has one."""
    vocab_size, device = model.config.vocab_size, cache.pool.backend.device
    instance = EngineCore(
        instance_id, model, cache, limits, vocab_size=vocab_size, device=device, grammars=grammars
    )
    instance.local_executor.recorded = recorded_batches(model, cache, limits, device)
    if instance.local_executor.recorded:
        instance.local_executor.run_ahead(instance.launch_choice)
    return instance


def compile_kernels(
    model: Model,
    limits: Limits,
    device: torch.device,
    *,
    bits: Seq[int] = (),
    quantized: Mapping[tuple[Part, Precision], RangePlan] | None = None,
) -> None:
    """Compile what this model's steps will run. May be called in any thread.

    bits: of the variants below full precision. quantized: their layouts, without which a GPU compiles at the
    first step with one of them; with them it needs no examples.
    """
    config = model.config
    bits = () if quantized and device.type == "cuda" else bits
    has_kv_codes = limits.kv_dtype != "full"
    rehearsal = Rehearsal(
        config=config,
        plan=model.plan,
        quantized=quantized or {},
        block_tokens=limits.block_tokens,
        has_kv_codes=has_kv_codes,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    for tp in degrees(config, model.plan.max_tp):  # Triton compiles for a number of heads
        heads, kv_heads = heads_of(config.num_heads, config.num_kv_heads, Shard(0, tp))
        kernels.warm_up(
            model.dtype,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size // (1 if config.mixture else tp),
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_dim=config.head_dim,
            block_tokens=limits.block_tokens,
            device=device,
            bits=bits if tp == 1 else (),
            has_kv_codes=has_kv_codes,
            rotary_dim=config.rope.dim,
            softcap=config.attention_softcap,
            has_sinks=config.has_sinks,
            rehearse=rehearsal if tp == 1 else None,  # it has all degrees
        )


def canary_steps(instance: EngineCore) -> Iterator[None]:
    """Record decodes, run a first request, a prefill and two decodes, and yield after each step.

    Statistics start over. Raises ModelError if the logits are not numbers.
    """
    if recorded := instance.local_executor.recorded:
        yield from recorded.record()
    longest = min(instance.limits.max_model_len - 3, instance.limits.max_num_batched_tokens + 1, 64)
    prompt = [i * 7 % instance.vocab_size for i in range(max(1, longest))]
    sampling = SamplingParams(max_tokens=3, seed=0, temperature=0.0, logprobs=0)
    instance.submit(own_request("canary", prompt, sampling))
    logprobs: list[float] = []
    while instance.has_work:
        for output in instance.step():
            if output.delta.error:
                raise ModelError(f"{instance.id}: the first request failed: {output.delta.error}")
            logprobs += [each.logprob for each in output.delta.logprobs or []]
        yield
    if not logprobs or not all(-1e30 < logprob <= 0 for logprob in logprobs):
        raise ModelError(f"{instance.id}: the first forward pass gave {logprobs}; the weights are damaged")
    instance.check_integrity()
    instance.stats = Stats()
    instance.scheduler.reset_counts()
    instance.num_steps = 0
