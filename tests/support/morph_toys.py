"""A toy model over real pages: its KV cache and its weights are ranges of a real pool, so that a block that
was moved wrongly, a page with two owners or weights that were not copied give another token or an error.

The model is `engine_toys.ToyModel` in all but where it keeps things: the tokens lie in every layer of a
real `KVCache`, and each half of each layer must read as the image of the precision it claims to have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import torch

from bus.messages import PARTS, LayerShape, Part
from bus.morphs import MorphReport
from bus.precisions import Precision
from kernels.plan import AttentionPlan
from tests.support.engine_toys import VOCAB, next_token
from worker.engine.core import EngineCore
from worker.engine.engine import Engine
from worker.engine.sequence import Limits
from worker.memory import CpuBackend, KVCache, MappingFailed, PagePool, VirtualRange
from worker.morph.manager import MorphManager
from worker.morph.resizer import KVResizer
from worker.morph.target import Target
from worker.shape.copier import CopyJob, Pause

PAGE = 4096
BLOCK_TOKENS = 4
PAGES: dict[Precision, int] = {"full": 6, "int8": 3, "int4": 2, "int3": 1}  # of an FFN; attention has a third

Key = tuple[int, Part, Precision]


class ToyVariants:
    """`fail_on`: verbs that fail, `fail_once`: the next time only. `hold`: copies stop before their last page
    until it is set."""

    def __init__(
        self, pool: PagePool, num_layers: int, precisions: Sequence[Precision] = tuple(PAGES)
    ) -> None:
        self.pool, self.num_layers = pool, num_layers
        self.precisions = tuple(precisions)
        self.fail_on: set[str] = set()
        self.fail_once: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()
        self.expected: list[Key] = []
        self.ranges: dict[Key, VirtualRange] = {}
        self.resident: dict[tuple[int, Part], Precision] = {}
        for layer in range(num_layers):
            for part in PARTS:
                for precision in precisions:
                    nbytes = self.pages(layer, part, precision) * PAGE
                    owner = f"{part} {layer} {precision}"
                    self.ranges[layer, part, precision] = pool.reserve(nbytes, kind="weights", owner=owner)
                self.map(layer, part, "full")
                self.view((layer, part, "full"))[:] = self.image((layer, part, "full"))
                self.resident[layer, part] = "full"

    def pages(self, layer: int, part: Part, precision: Precision) -> int:
        return PAGES[precision] if part == "ffn" else -(-PAGES[precision] // 3)

    def map(self, layer: int, part: Part, precision: Precision) -> None:
        self._may_fail("map")
        self.ranges[layer, part, precision].map(0, self.pages(layer, part, precision))

    def copy_job(self, layer: int, part: Part, precision: Precision) -> CopyJob:
        self._may_fail("copy_job")
        nbytes = self.pages(layer, part, precision) * PAGE
        return CopyJob(nbytes, nbytes, partial(self._copy, (layer, part, precision)))

    def expect(self, variants: Sequence[Key]) -> None:
        self.expected = list(variants)

    def _copy(self, key: Key, pause: Pause) -> None:
        view = self.view(key)
        for start in range(0, len(view), PAGE):
            if start + PAGE >= len(view):
                self._may_fail("copy")
                while not self.hold.wait(0.002):
                    pause()
            view[start : start + PAGE] = self.image(key)
            pause()

    def check(self, layer: int, part: Part, precision: Precision) -> None:
        self._may_fail("check")
        self.verify((layer, part, precision))

    def install(self, layer: int, part: Part, precision: Precision) -> None:
        self._may_fail("install")
        self.resident[layer, part] = precision

    def unmap(self, layer: int, part: Part, precision: Precision) -> None:
        self._may_fail("unmap")
        self.ranges[layer, part, precision].resize(0)

    def release(self) -> None:
        for memory in self.ranges.values():
            memory.release()

    def image(self, key: Key) -> int:
        layer, part, precision = key
        return 1 + (layer * 2 + PARTS.index(part)) * len(PAGES) + list(PAGES).index(precision)

    def view(self, key: Key) -> torch.Tensor:
        return self.ranges[key].tensor(torch.uint8, (self.pages(*key) * PAGE,))

    def verify(self, key: Key) -> None:
        if not self.view(key).eq(self.image(key)).all():
            raise RuntimeError(f"{key} is not what it should be")

    def check_integrity(self) -> None:
        """Check that of each half exactly the variant that serves is mapped."""
        for (layer, part, precision), memory in self.ranges.items():
            expected = memory.num_pages if self.resident[layer, part] == precision else 0
            assert memory.num_mapped == expected, (layer, part, precision, memory.num_mapped)

    def _may_fail(self, verb: str) -> None:
        if verb in self.fail_on or verb in self.fail_once:
            self.fail_once.discard(verb)
            raise MappingFailed(f"{verb} was told to fail")


class PagedToyModel:
    """Greedy output is `engine_toys.continuation`."""

    def __init__(self, variants: ToyVariants) -> None:
        self.variants = variants
        self.step_s = 0.0
        self.shapes: list[list[LayerShape]] = []  # of each step

    def expert_use(self) -> list[list[float]]:
        return []

    def shape(self) -> list[LayerShape]:
        resident = self.variants.resident
        return [
            LayerShape(attention=resident[i, "attention"], ffn=resident[i, "ffn"])
            for i in range(self.variants.num_layers)
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        kv: KVCache,
        logit_rows: torch.Tensor,
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        time.sleep(self.step_s)
        shape = self.shape()
        self.shapes.append(shape)
        for i, layer in enumerate(shape):
            for part in PARTS:
                self.variants.verify((i, part, layer.of(part)))
        assert len(plan.slot_mapping.unique()) == len(token_ids)
        blocks, offsets = plan.slot_mapping // kv.block_tokens, plan.slot_mapping % kv.block_tokens
        assert int(blocks.max()) < kv.num_blocks
        for i, cache in enumerate(kv.layers):
            cache[blocks, 0, 0, offsets, 0] = (token_ids + i).float()
        answers = torch.zeros(len(token_ids), VOCAB)
        cu = plan.cu_seqlens_q.tolist()
        for s, context_len in enumerate(plan.context_lens.tolist()):
            num_blocks = -(-context_len // kv.block_tokens)
            table = plan.block_table[s, :num_blocks].long()
            read = [cache[table, 0, 0, :, 0].flatten()[:context_len].long() for cache in kv.layers]
            assert all((tokens - i).equal(read[0]) for i, tokens in enumerate(read)), "layers differ"
            context = read[0].tolist()
            for t in range(cu[s], cu[s + 1]):
                answers[t, next_token(context[: int(plan.positions[t]) + 1])] = 10.0
        if hidden is not None:
            hidden.append(answers[logit_rows])
        return answers[logit_rows]


@dataclass
class Rig:
    """An engine, one instance `toy@w0` of it, and the executor of its morphs."""

    num_layers: int = 2
    num_pages: int = 100
    reserve: int = 4  # of the largest quantised layer
    num_seqs: int = 8
    model_len: int = 200
    step_tokens: int = 16
    max_kv_pages: int = 0  # of all layers; 0: all that are free
    order: Sequence[int] = ()
    precisions: Sequence[Precision] = tuple(PAGES)
    reports: list[MorphReport] = field(default_factory=list)
    beside: Executor | None = None  # maps pages in another thread, as on a GPU
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.pool = PagePool(CpuBackend(PAGE), self.num_pages * PAGE, self.beside)
        self.variants = ToyVariants(self.pool, self.num_layers, self.precisions)
        self.model = PagedToyModel(self.variants)
        limits = Limits(self.num_seqs, self.step_tokens, self.model_len, BLOCK_TOKENS)
        self.cache = KVCache(
            self.pool,
            num_layers=self.num_layers,
            num_kv_heads=1,
            head_dim=48,  # a block of 1536 bytes: two and two thirds to a page
            block_tokens=BLOCK_TOKENS,
            dtype=torch.float32,
            max_blocks=400,
            owner="toy",
        )
        pages = min(self.pool.num_free - self.reserve, self.max_kv_pages or self.num_pages)
        self.cache.grow(pages // self.num_layers)
        self.instance = EngineCore(
            "toy@w0",
            self.model,
            self.cache,
            limits,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
            clock=self.clock,
        )
        self.engine = Engine()
        self.engine.add_instance(self.instance)
        self.resizer = KVResizer(
            self.instance, self.cache, reserve_pages=self.reserve, useful_blocks=self.cache.max_blocks
        )
        self.target = Target(self.instance, self.variants, self.resizer, self.order)
        self.executor = MorphManager("w0", {"toy@w0": self.target}, step_share=1.0)

    def advance(self) -> list[MorphReport]:
        """A boundary, as the engine's thread makes it."""
        new = self.executor.advance(self.engine.has_work)
        self.reports += new
        return new

    def settle(self, within_s: float = 5.0) -> list[MorphReport]:
        """Boundaries without steps until nothing runs; the ends since the call."""
        deadline, new = time.monotonic() + within_s, []
        while True:
            new += self.advance()
            if not self.executor.num_running:
                return [report for report in new if report.state != "running"]
            assert time.monotonic() < deadline, "a morph does not come to an end"
            time.sleep(0.0005)

    def check_integrity(self) -> None:
        self.engine.check_integrity()
        self.cache.check_integrity()
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert counts.budget == counts.weights + counts.kv + counts.free
        if not self.executor.num_running:
            self.variants.check_integrity()

    def close(self) -> None:
        self.executor.close()
        self.pool.close()
