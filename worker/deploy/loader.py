"""A model on its way into a worker that serves others: its needs, its pages, and their contents.

Methods that read and compute run in the loading thread and touch no page of the pool. Methods that reserve
and map run in the engine's thread, between steps. The loading thread fills mapped pages that no step reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import kernels
from bus.checkpoints import BadCheckpoint, folder_digest
from bus.messages import PARTS, Part
from bus.morphs import Deploy
from bus.precisions import BITS, PRECISIONS, Precision
from kernels.product import Product
from worker.deploy.model_host import ModelHost
from worker.engine.build import (
    MIB,
    compile_kernels,
    instance_of,
    make_cache,
    served_limits,
    useful_blocks,
    useful_pages,
)
from worker.engine.sequence import Limits
from worker.grammars.compiler import GuidanceCompiler
from worker.memory import KVCache, VirtualRange
from worker.memory.backend import NO_PAGE
from worker.model import Model, ModelError, read_config
from worker.model.config import ModelConfig
from worker.model.layout import ModelPlan, RangePlan, degrees, plan_model, whole_sources
from worker.model.model import DTYPES, reserve_model
from worker.model.mxfp4 import memory_notice
from worker.model.ready_weights import open_checkpoint
from worker.model.shard import ALONE, Shard
from worker.model.sources import RandomWeights, WeightSource
from worker.model.weights import LoadedRange, view_mapped
from worker.morph.losses import Measured, losses_of
from worker.morph.resizer import KVResizer
from worker.morph.run import NotApplied
from worker.morph.target import MemberTarget, Target
from worker.morph.variants import NoVariants, Variants, reserve_pages
from worker.pipeline.split import own_part
from worker.shape.copier import CopyJob, Pause, source_copy
from worker.shape.host_images import MatrixSource, find_matrices
from worker.shape.kv_profile import kv_loss_or_why
from worker.shape.layer_order import half_losses_or_why, load_order
from worker.shape.ranges import PageMask, build_half, products_of, spans_of
from worker.shape.variants import LayerVariants

log = logging.getLogger(__name__)

MAP_AT_ONCE = 256  # pages: a millisecond on a CPU


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the weights that is loaded by itself."""

    nbytes: int
    num_pages: int
    map: Callable[[], bool]  # a unit of mapping; True: there is more to map
    job: Callable[[], CopyJob]
    install: Callable[[], None]


class ModelLoader:
    """The model of one Deploy. Methods raise NotApplied and ModelError, and say what is wrong."""

    def __init__(self, command: Deploy, host: ModelHost) -> None:
        self.command, self.host = command, host
        self.settings, self.pool = host.settings, host.pool
        self.images_progress = "variants in host memory"  # later with the share done
        self.variants: Variants = NoVariants()
        self._cache: KVCache | None = None
        self.precision: Precision = command.precision  # of the layers; `read` knows that of the checkpoint
        self.held: list[Precision] = [
            one for one in PRECISIONS if one in host.settings.variants
        ]  # below full
        self.products: list[str] = []  # the kernels of products, as text
        self._model: Model | None = None

    # ----------------------------------------------------------------------------- in the loading thread

    def read(self, pause: Pause) -> None:
        """Read the folder, but for its weights."""
        command, settings = self.command, self.settings
        self.folder = Path(command.path).expanduser().resolve()
        whole = read_config(self.folder)
        self.num_layers = whole.num_layers  # of all stages
        if fixed := whole.fixed_precision:
            if command.precision not in ("full", fixed):
                asked = command.precision
                raise NotApplied(
                    "failed", f"{self.folder}: the checkpoint has its layers in {fixed} alone, not in {asked}"
                )
            self.precision, self.held = fixed, [fixed]
        elif command.precision != "full" and command.precision not in settings.variants:
            there_are = ", ".join(["full", *settings.variants])
            raise NotApplied(
                "failed", f"this worker keeps no {command.precision} variants; there are {there_are}"
            )
        context = command.max_model_len or settings.max_model_len
        self.config: ModelConfig = own_part(whole, command, self.host.worker).up_to(context)
        dtype = dtype_of(settings.dtype, self.pool.backend.device) or self.config.dtype
        if dtype not in DTYPES:
            there_are = ", ".join(map(str, DTYPES))
            raise ModelError(f"{self.folder}: dtype {dtype} is not supported; these are: {there_are}")
        self.plan: ModelPlan = plan_model(self.config, dtype, self.pool.page_bytes, settings.max_tp)
        is_dummy = settings.load_format == "dummy"
        self.source: WeightSource = RandomWeights() if is_dummy else open_checkpoint(self.config)
        self.source.check(whole_sources(self.config))
        if self.config.has_mxfp4_experts and not is_dummy:
            log.warning("%s: %s", command.model, memory_notice(self.config, self.plan))
        self.order, self.order_name = (
            (list(range(self.num_layers)), "front-to-back")
            if is_dummy
            else load_order(self.folder, settings.layer_order)
        )
        self.losses: Measured = {}
        self.losses_assumed: dict[Precision, str] = {}
        if whole.fixed_precision:  # nothing is lost against the checkpoint
            self.losses = {whole.fixed_precision: dict.fromkeys(PARTS, [0.0] * whole.num_layers)}
        elif not is_dummy:
            found = half_losses_or_why(whole, self.held, settings.quantization)
            self.losses, self.losses_assumed = found
            for name, why in self.losses_assumed.items():
                log.warning("the loss of %s is assumed: %s", name, why)
        self.kv_loss, why = (None, "the weights are random") if is_dummy else kv_loss_or_why(whole)
        if self.kv_loss is None:
            log.info("the loss of a KV cache in 8 bits is unknown: %s", why)
        self.digest = command.digest or _digest(self.folder)
        self.check_unchanged(pause)

    def check_unchanged(self, pause: Pause) -> None:
        """Compare the digest again: files replaced meanwhile would make a model of two checkpoints."""
        if (found := _digest(self.folder)) != self.digest:
            raise NotApplied(
                "failed",
                f"{self.folder} is not the checkpoint that was planned with: its digest is {found[:12]}, not"
                f" {self.digest[:12]}; register it again",
            )

    def find_matrices(self, pause: Pause) -> None:
        """Find the matrices of the variants below full precision."""
        self._matrices: dict[Precision, MatrixSource] = {}
        model, method = self.model, self.settings.quantization
        for name in self.held:
            self._matrices[name] = find_matrices(model.config, model.source, name, method)
            pause()

    def make_images(self, pause: Pause) -> None:
        """Make the host's images of all variants, if no worker of the host has made them yet."""

        def tell(done: int, total: int) -> None:
            self.images_progress = (
                f"variants in host memory: {10 * done // total * 10} % of {total / MIB:.0f} MiB"
            )
            pause()  # while another worker makes them

        assert isinstance(self.variants, LayerVariants)
        self.variants.open(self.host.memory, tell, pause)

    def compile(self, pause: Pause) -> None:
        bits = [BITS[precision] for precision in self.variants.precisions if precision != "full"]
        device, quantized = self.pool.backend.device, dict[tuple[Part, Precision], RangePlan]()
        if isinstance(self.variants, LayerVariants):
            plans = self.variants.ranges.plans.items()
            quantized = {key: plan for key, plan in plans if key[1] != "full"}
        compile_kernels(self.model, self.limits, device, bits=bits, quantized=quantized)
        name = f"{self.digest} {self.model.dtype}"
        self.products = kernels.choose_products(self._products(), name, device)
        for line in self.products:
            log.debug("%s: %s tokens", self.command.model, line)

    def _products(self) -> Iterator[Product]:
        """Yield the products of a step, then those of other precisions and tensor-parallel degrees."""
        yield from self.model.products()
        others = (Shard(0, size) for size in degrees(self.config, self.plan.max_tp))
        shards = dict.fromkeys((ALONE, *others))
        if isinstance(self.variants, LayerVariants):
            plans, held = self.variants.ranges.plans, self.variants.precisions
            yield from products_of(self.model, {key: plans[key] for key in plans if key[1] in held}, shards)
        else:
            full = dict(zip(PARTS, self.plan.layers[0], strict=True))
            yield from products_of(self.model, {(part, "full"): full[part] for part in PARTS}, shards)

    # ----------------------------------------------------------------------------- in the engine's thread

    @property
    def model(self) -> Model:
        assert self._model, "its folder was not read"
        return self._model

    @property
    def cache(self) -> KVCache:
        assert self._cache, "its addresses were not reserved"
        return self._cache

    @property
    def num_blocks(self) -> int:
        """KV blocks so far."""
        return self._cache.num_blocks if self._cache else 0

    def reserve(self) -> None:
        """Reserve addresses for the weights."""
        settings = self.settings
        self._model = reserve_model(self.config, self.plan, self.source, self.pool)
        longest = self.command.max_model_len or settings.max_model_len
        self.limits = Limits.of(settings, **served_limits(self.model, longest))
        if self.command.kv_dtype != "full":
            if settings.block_tokens % 2:
                tokens = settings.block_tokens
                raise ModelError(
                    f"KV in {self.command.kv_dtype} needs an even worker.block_tokens, not {tokens}"
                )
            self.limits = replace(self.limits, kv_dtype=self.command.kv_dtype)

    def reserve_rest(self) -> None:
        """Reserve addresses for the variants and the KV cache; from here on the needs are known."""
        if self.held:
            self.variants = LayerVariants(
                self.model, self.pool, precisions=list(self._matrices), matrices=self._matrices
            )
        self._cache = make_cache(self.pool, self.model, self.limits, self.command.model)
        self.pieces = list(self._pieces())

    @property
    def weight_pages(self) -> int:
        return sum(piece.num_pages for piece in self.pieces)

    def pages_in(self, precision: Precision) -> int:
        """Return the pages of the weights with all layers in a precision of the variants."""
        assert isinstance(self.variants, LayerVariants)
        needed = self.variants.ranges.needed
        layers = range(len(self.plan.layers))
        halves = sum(int(needed((layer, part, precision), ALONE).sum()) for layer in layers for part in PARTS)
        ends = (plan.pages(self.pool.page_bytes) for plan in (self.plan.embedding, self.plan.head) if plan)
        return halves + sum(int(pages.sum()) for pages in ends)

    @property
    def least_kv_pages(self) -> int:
        """KV pages of all layers that the model must have."""
        longest = -(-self.limits.max_model_len // self.limits.block_tokens)
        blocks = min(self.command.blocks or longest, self.cache.max_blocks)
        return self.cache.num_layers * self.cache.pages_for(max(1, blocks))

    @property
    def useful_kv_pages(self) -> int:
        return useful_pages(self.cache, self.model, self.limits)

    @property
    def reserve_pages(self) -> int:
        """Free pages that swaps of its layers need."""
        return reserve_pages(self.variants, self.config.num_layers)

    def make_target(self) -> Target:
        """Return the instance that serves, once the layers are installed and the KV cache has pages."""
        self.model.complete()
        name, grammars = self.command.instance, self.make_grammars()
        instance = instance_of(name, self.model, self.cache, self.limits, grammars)
        resizer = KVResizer(
            instance,
            self.cache,
            reserve_pages=self.host.reserve_pages,
            useful_blocks=useful_blocks(self.limits),
            owns_rest=not self.host.models,
        )
        precisions = self.variants.precisions
        losses = losses_of(self.config.num_layers, precisions, self.losses, precisions[0])
        target = Target(instance, self.variants, resizer, self.order, losses)
        target.kv_loss = self.kv_loss
        self.let_convert(target)
        return target

    def make_grammars(self) -> GuidanceCompiler:
        """Return the compiler of grammars for the model's tokenizer, which is read with the first one."""
        return GuidanceCompiler(self.config.folder, self.config.vocab_size, self.pool.backend.device)

    def let_convert(self, target: MemberTarget) -> None:
        """Let morphs of the target compile what KV in 8 bits needs."""
        in_8_bits, device = replace(self.limits, kv_dtype="int8"), self.pool.backend.device
        target.compile_kv = partial(compile_kernels, self.model, in_8_bits, device)

    def release(self) -> None:
        """Release every page and address; nothing runs on them and nothing is copied any more."""
        if self._cache:
            self._cache.release()
            self._cache = None
        self.variants.release()
        self.variants = NoVariants()
        if self._model:
            self._model.release()
            self._model = None

    def _pieces(self) -> Iterator[Piece]:
        """Yield the embedding, the head, and the halves of all layers."""
        places = {
            id(plan): (layer, part)
            for layer, halves in enumerate(self.plan.layers)
            for part, plan in zip(PARTS, halves, strict=True)
        }
        for loaded, plan in zip(self.model.ranges, self.plan.ranges(), strict=True):
            place = places.get(id(plan))
            if place and self.held:
                yield self._half(*place, loaded, plan)
            else:
                yield self._whole(loaded, plan, place)

    def _whole(self, loaded: LoadedRange, plan: RangePlan, place: tuple[int, Part] | None) -> Piece:
        """Return the piece of a range in full precision, from the checkpoint."""
        pages = plan.pages(self.pool.page_bytes)
        spans = spans_of(pages, self.pool.page_bytes, plan.nbytes)

        def install() -> None:
            view_mapped(loaded, plan)
            if place:
                half = build_half(self.model, (*place, "full"), loaded.tensors, ALONE)
                self.model.install(place[0], half)

        return Piece(
            sum(end - begin for begin, end in spans),
            int(pages.sum()),
            lambda: _map_some(loaded.memory, pages),
            lambda: source_copy(plan.name, plan, self.source, loaded.memory, spans, self.pool.backend.device),
            install,
        )

    def _half(self, layer: int, part: Part, loaded: LoadedRange, plan: RangePlan) -> Piece:
        """Return the piece of a half of a layer from the host's images."""
        variants, place = self.variants, (layer, part, self.precision)
        assert isinstance(variants, LayerVariants)

        def map_it() -> bool:
            variants.map(*place)
            return False

        def install() -> None:
            if self.precision == "full":
                view_mapped(loaded, plan)
            variants.check(*place)
            variants.install(*place)

        spans = variants.ranges.spans(place, variants.ranges.needed(place, ALONE))
        return Piece(
            sum(end - begin for begin, end in spans),
            variants.pages(*place),
            map_it,
            partial(variants.copy_job, *place),
            install,
        )


def dtype_of(name: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype that the setting means on this device; None: the checkpoint's."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return named.get(name) or (torch.float32 if device.type == "cpu" else None)


def _digest(folder: Path) -> str:
    try:
        return folder_digest(folder)
    except BadCheckpoint as error:
        raise NotApplied("failed", str(error)) from error


def _map_some(memory: VirtualRange, wanted: PageMask) -> bool:
    is_mapped = memory.pages != NO_PAGE
    missing = np.flatnonzero(wanted & ~is_mapped)
    is_mapped[missing[:MAP_AT_ONCE]] = True
    memory.have(is_mapped, zeroed=False)
    return len(missing) > MAP_AT_ONCE
