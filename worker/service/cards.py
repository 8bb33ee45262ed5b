"""What a worker shows of an instance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bus.messages import PARTS, InstanceCard
from bus.settings import WorkerSettings
from worker.deploy.newcomer import Newcomer
from worker.model import Model
from worker.model.layout import degrees
from worker.morph.target import Target
from worker.morph.verbs import layer_pages
from worker.parallel.grouping import Grouping


def card_of_newcomer(newcomer: Newcomer, target: Target) -> InstanceCard:
    """Of one that was deployed."""
    site = newcomer.site
    card = card_of(
        target,
        newcomer.command.model,
        newcomer.folder,
        newcomer.model,
        newcomer.order_name,
        site.settings,
        site.worker,
        None,
    )
    return replace(card, deployed=newcomer.command.id, precision=newcomer.command.precision)


def card_of(
    target: Target,
    name: str,
    path: Path,
    model: Model,
    order_name: str,
    settings: WorkerSettings,
    worker: str,
    grouping: Grouping | None,
) -> InstanceCard:
    """What is shown of it. grouping: None: it joins no group."""
    possible = degrees(model.config, settings.max_tp) if grouping else [1]
    return InstanceCard(
        id=target.instance.id,
        model=name,
        model_path=str(path),
        max_model_len=target.instance.limits.max_model_len,
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_layers,
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=settings.block_tokens,
        workers=[worker],
        variants=list(target.variants.precisions),
        order=target.order,
        order_name=order_name,
        min_blocks=target.resizer.min_blocks,
        max_blocks=max_blocks(target, max(possible)),
        kv_heads=model.config.num_kv_heads,
        degrees=possible,
        tokens_at={tp: grouping.place.tokens_at(tp) for tp in possible} if grouping else {},
        layer_pages=layer_pages(target.variants, model.config.num_layers),
        attention_pages=layer_pages(target.variants, model.config.num_layers, ["attention"]),
    )


def max_blocks(target: Target, degree: int) -> int:
    """KV blocks that no order can exceed: the memory less the least that the layers take, in their fewest
    bits and with the FFN divided among `degree` workers."""
    cache, variants = target.resizer.cache, target.variants
    pages = cache.pool.num_pages
    for layer in range(cache.num_layers):
        attention, ffn = (
            min(variants.pages(layer, part, precision) for precision in variants.precisions) for part in PARTS
        )
        pages -= attention + ffn // degree
    return cache.blocks_in(max(0, pages) // cache.num_layers)
