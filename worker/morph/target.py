"""One instance as morphs see it: its engine core, the variants of its layers, and its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import structs

from bus.messages import PARTS, LayerShape
from bus.precisions import KV_PRECISIONS, LOWEST, PRECISIONS, Precision
from worker.distributed.messages import (
    Actions,
    CompileKV,
    ConvertKV,
    CountKV,
    DropHalf,
    GrowKV,
    HalfActions,
    InstallHalf,
    MemberLoad,
    MemberStatus,
    MorphActions,
    MoveBlocks,
    PrepareHalf,
    ShrinkKV,
)
from worker.engine.core import EngineCore
from worker.memory import MappingFailed, OutOfPages
from worker.morph.losses import Losses, losses_of
from worker.morph.plan import Half, order_towards
from worker.morph.reflex_loop import MemberRoom
from worker.morph.resizer import KVResizer
from worker.morph.sizing import KVState
from worker.morph.variants import Variants
from worker.shape.copier import Copier, Copy, CopyJob
from worker.shape.ranges import VariantKey


class PreparedHalf(NamedTuple):
    """A half's new variant: mapped, and being copied."""

    precision: Precision
    copy: Copy


class MemberTarget:
    """The layers and the KV cache that one worker has of an instance; carries out actions of morphs there."""

    def __init__(
        self,
        shape: Callable[[], Sequence[LayerShape]],
        variants: Variants,
        resizer: KVResizer,
        first: int = 0,
    ) -> None:
        """shape: returns that of the layers here. first: the number of their first one in the model."""
        self.variants, self.resizer, self.first = variants, resizer, first
        self.copier: Copier | None = None  # set when a morph manager takes the target
        self.compile_kv: Callable[[], None] = lambda: None  # compiles what reads and writes KV in 8 bits
        self.on_kv_converted: Callable[[], None] = lambda: None  # called when all layers are in one precision
        self._kv_compiling: Copy | None = None
        self.prepared: dict[Half, PreparedHalf] = {}
        self._shape = shape
        self._no_room: dict[Half, str] = {}  # why a variant could not be mapped
        self._left_mapped: set[tuple[Half, Precision]] = set()  # the system refused to unmap them

    def precision(self, half: Half) -> Precision:
        """Return the precision in which `half` runs."""
        return self._shape()[half.layer].of(half.part)

    def pages(self, half: Half, precision: Precision) -> int:
        """Return the pages that a variant of `half` takes. All layers of a model have the same shapes."""
        return self.variants.pages(min(half.layer, self.resizer.num_layers - 1), half.part, precision)

    @property
    def num_prepared(self) -> int:
        """The work that has ended beside the steps: copies of variants, and compiling for KV in 8 bits."""
        copied = sum(each.copy.is_done for each in self.prepared.values())
        return copied + (self._kv_compiling is not None and self._kv_compiling.is_done)

    @property
    def waits_for_disk(self) -> bool:
        """True if a variant that is being copied comes from a disk."""
        copies = (each.copy for each in self.prepared.values())
        return any(copy.reads.is_disk and not copy.is_done for copy in copies)

    def status(self) -> MemberStatus:
        """Return what morphs need to know of this member's memory."""
        resizer = self.resizer
        ended = {half: each.copy for half, each in self.prepared.items() if each.copy.is_done}
        errors = [*self._no_room.values(), *(copy.error_text for copy in ended.values())]
        compiling = self._kv_compiling
        return MemberStatus(
            first=self.first,
            end=self.first + resizer.num_layers,
            free_pages=resizer.cache.pool.num_free,
            spare_pages=resizer.num_spare_pages,
            own_pages=resizer.own_pages,
            kv_pages=resizer.cache.pages_per_layer,
            growable_pages=resizer.growable(),
            most_pages=resizer.most_pages_per_layer,
            useful_pages=resizer.useful_pages_per_layer,
            copied=[(self.first + half.layer, half.part) for half in ended],
            copy_error=next(filter(None, errors), ""),
            kv_form=resizer.cache.form,
            is_kv_compiled=compiling is not None and compiling.is_done,
            kv_error=compiling.error_text if compiling else "",
        )

    # ----------------------------------------------------------------------------- actions

    def carry_out(self, action: Actions) -> None:
        """Carry out one action of a morph at this member; raises what makes it fail."""
        match action:
            case PrepareHalf():
                self._prepare(Half(action.layer, action.part), action.precision)
                self._expect(action.ahead)
            case InstallHalf():
                self._install(Half(action.layer, action.part))
            case DropHalf():
                self._drop(Half(action.layer, action.part))
            case GrowKV() | ShrinkKV() | MoveBlocks():
                self.resizer.carry_out(action)
            case CompileKV():
                self._compile_kv()
            case CountKV() | ConvertKV():
                self.resizer.carry_out_conversion(action)
                if self.resizer.cache.form:
                    self.on_kv_converted()
            case _:
                raise TypeError(f"{type(action).__name__} is nothing that a member can do by itself")

    def carry_out_at_stage(self, action: MorphActions) -> None:
        """Carry out what the leader of a pipeline sends: halves count in the model, most are elsewhere.

        For a variant that finds no room the stage need not end: the leader hears of it by the status.
        """
        if isinstance(action, HalfActions | ConvertKV):
            is_here = 0 <= action.layer - self.first < self.resizer.num_layers
            action = structs.replace(action, layer=action.layer - self.first)
            if isinstance(action, PrepareHalf) and action.ahead:
                layer, part, precision = action.ahead
                action = structs.replace(action, ahead=(layer - self.first, part, precision))
            if not is_here:
                if isinstance(action, PrepareHalf):
                    self._expect(action.ahead)
                return
        try:
            self.carry_out(action)
        except (MappingFailed, OutOfPages) as error:
            if not isinstance(action, PrepareHalf):
                raise
            self._no_room[Half(action.layer, action.part)] = str(error)

    def installed(self, half: Half) -> None:
        """Note that another variant of `half` runs from the next step on."""

    def drop_all(self) -> None:
        """Unmap every prepared variant. Raises MappingFailed."""
        for half in list(self.prepared):
            self._drop(half)

    def unmap_rest(self) -> None:
        """Unmap what could not be unmapped when it should have been. Raises MappingFailed."""
        for half, precision in list(self._left_mapped):
            self._unmap(half, precision)

    def _prepare(self, half: Half, precision: Precision) -> None:
        """Map a variant and start its copy. Raises MappingFailed and OutOfPages, having changed nothing."""
        assert self.copier
        self.variants.map(*half, precision)
        self.resizer.own_pages -= self.pages(half, precision)
        try:
            copy = self.copier.start(self.variants.copy_job(*half, precision))
        except BaseException:
            self._unmap(half, precision)
            raise
        self.prepared[half] = PreparedHalf(precision, copy)

    def _expect(self, ahead: VariantKey | None = None) -> None:
        """Read ahead what is to be copied next: prepared variants that wait for their turn, then `ahead`."""
        waiting = [(*half, each.precision) for half, each in self.prepared.items() if not each.copy.has_begun]
        is_here = ahead is not None and 0 <= ahead[0] < self.resizer.num_layers
        self.variants.expect([*waiting, ahead] if ahead and is_here else waiting)

    def _compile_kv(self) -> None:
        """Compile the kernels of KV in 8 bits in the thread that copies; again only after an error."""
        assert self.copier
        if self._kv_compiling is None or (self._kv_compiling.is_done and self._kv_compiling.error_text):
            self._kv_compiling = self.copier.start(CopyJob(0, 0, lambda pause: self.compile_kv()))

    def _install(self, half: Half) -> None:
        """Run on the prepared variant and unmap the old one. Raises what its copy or the check raises."""
        if (prepared := self.prepared.get(half)) is None:  # dropped meanwhile
            return
        prepared.copy.raise_error()
        old = self.precision(half)
        self.variants.check(*half, prepared.precision)
        self.variants.install(*half, prepared.precision)
        del self.prepared[half]
        self.installed(half)
        self._unmap(half, old)

    def _drop(self, half: Half) -> None:
        self._no_room.pop(half, None)
        if prepared := self.prepared.pop(half, None):
            prepared.copy.stop()
            self._expect()
            self._unmap(half, prepared.precision)

    def _unmap(self, half: Half, precision: Precision) -> None:
        """Give the pages of a variant to the KV cache. Raises MappingFailed; `unmap_rest` tries again."""
        self._left_mapped.add((half, precision))
        self.variants.unmap(*half, precision)
        self._left_mapped.remove((half, precision))
        self.resizer.own_pages += self.pages(half, precision)


class Target(MemberTarget):
    """An instance as the worker that has its requests sees it: all its layers, and the memory here."""

    def __init__(
        self,
        instance: EngineCore,
        variants: Variants,
        resizer: KVResizer,
        order: Sequence[int] = (),
        losses: Losses | None = None,
    ) -> None:
        """Make the target of an instance.

        order: in which layers lose bits; default front to back. losses: of halves in fewer bits; default as
        without a profile.
        """
        super().__init__(lambda: instance.shape, variants, resizer)
        self.instance = instance
        self.order = list(order) or list(range(len(instance.shape)))
        self.losses = losses or losses_of(len(self.order), variants.precisions, {}, variants.precisions[0])
        self.kv_loss: float | None = None  # share of the perplexity that KV in 8 bits costs; None: unknown
        self._best = variants.precisions[0]
        # Layers below the best, the last swapped last.
        self._swapped = [layer for layer in self.order if self._is_swapped(layer)]
        instance.executor.carry_out, instance.executor.status = self.carry_out, self.status

        def counted_blocks(with_found: bool) -> list[int]:
            blocks = resizer.cache.allocator
            return blocks.held if with_found else blocks.used

        instance.executor.counted_blocks = counted_blocks

    @property
    def halves(self) -> dict[Half, Precision]:
        """The precision of every half."""
        halves = (Half(layer, part) for layer in range(len(self.instance.shape)) for part in PARTS)
        return {half: self.precision(half) for half in halves}

    @property
    def saved_pages(self) -> int:
        """Pages by which the halves are smaller than in the best precision."""
        halves = [Half(layer, part) for layer in self._swapped for part in PARTS]
        return sum(self.pages(half, self._best) - self.pages(half, self.precision(half)) for half in halves)

    def order_towards(self, precision: Precision) -> list[int]:
        """Return the order in which layers go to `precision`; towards full the last swapped goes first."""
        return order_towards(precision, self.order, self._swapped)

    @property
    def kv_blocks(self) -> int:
        """KV blocks of the instance."""
        return self.instance.scheduler.blocks.capacity

    @property
    def min_blocks(self) -> int:
        """Blocks below which the cache never shrinks."""
        return self.resizer.min_blocks

    @property
    def knows_members(self) -> bool:
        """True if every member of the group has reported its status, and the group stands."""
        executor = self.instance.executor
        return executor.knows_members and not executor.is_lost

    def loads(self) -> list[MemberLoad]:
        """Return what runs and waits at every member, or here while they are not known."""
        executor = self.instance.executor
        if executor.num_members == 1 or not self.knows_members:
            return [self.load()]  # a status has more: made at each step, it took 5 % of a small model's token
        return [each.load for each in executor.statuses()]

    @property
    def kv(self) -> KVState:
        """The KV cache of all members, which are known; they are alike."""
        resizer, executor = self.resizer, self.instance.executor
        pages = min(each.kv_pages for each in executor.statuses())
        return KVState(
            form=resizer.cache.form,
            rest=self.instance.limits.kv_dtype,
            blocks={
                one: resizer.blocks_in(pages, executor.num_members, one)
                for one in KV_PRECISIONS
                if resizer.cache.can_convert
            },
            loss=self.kv_loss,
        )

    @property
    def is_kv_at_rest(self) -> bool:
        """True unless the KV cache has fewer bits than at rest, by this member."""
        return self.resizer.cache.form in ("full", self.instance.limits.kv_dtype)

    def room(self) -> MemberRoom:
        """Return the least memory of the members, which are known."""
        statuses = self.instance.executor.statuses()
        floors = [floor for each in statuses for floor in each.floors]
        return MemberRoom(
            min(each.kv_pages for each in statuses),
            min(each.growable_pages for each in statuses),
            min(floors, key=PRECISIONS.index, default=LOWEST),
        )

    def load(self) -> MemberLoad:
        """Return what runs and waits at this member."""
        load, scheduler = self.instance.load, self.instance.scheduler
        return MemberLoad(
            used=scheduler.blocks.num_used,
            needed=scheduler.num_blocks_needed,
            running=len(scheduler.running),
            waiting=load.num_waiting,
            waited_s=load.waited_for_blocks_s(),
            residence_s=load.residence.mean_s,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens_due,
            prompt_rate=load.prompt_rate.per_s,
            arriving=load.arrivals_per_s(),
            floor_refused=load.floor_refused(),
        )

    def status(self) -> MemberStatus:
        """Return what morphs need to know of this member."""
        instance = self.instance
        return structs.replace(
            super().status(),
            num_used=instance.scheduler.blocks.num_used,
            load=self.load(),
            headroom=self.resizer.headroom(),
            floors=instance.load.floors(),
        )

    def carry_out(self, action: Actions) -> None:
        """Carry out one action here; a half of a later stage of a pipeline only changes the shape."""
        if isinstance(action, HalfActions | ConvertKV) and action.layer >= self.resizer.num_layers:
            if isinstance(action, InstallHalf):
                self.installed(Half(action.layer, action.part))
            elif isinstance(action, PrepareHalf):
                self._expect(action.ahead)
        else:
            super().carry_out(action)

    def installed(self, half: Half) -> None:
        """Read the shape again, and remember the order in which layers were swapped."""
        self.instance.reshaped()
        if half.layer in self._swapped:
            self._swapped.remove(half.layer)
        if self._is_swapped(half.layer):
            self._swapped.append(half.layer)

    def _is_swapped(self, layer: int) -> bool:
        return self.instance.shape[layer] != LayerShape(attention=self._best, ffn=self._best)

    def check_integrity(self, is_brief: bool = False) -> None:
        """Raise BrokenInvariant or AssertionError if a page or a block is lost or owned twice.

        is_brief: leave out what takes milliseconds on a large device, for which steps would wait: the pool's
        pages, the blocks of each sequence, and those of the prefix cache. The caller makes up for it later.
        """
        self.resizer.cache.check_integrity(with_index=not is_brief)
        if not is_brief:
            self.instance.check_integrity()
            self.resizer.cache.pool.check_integrity()
