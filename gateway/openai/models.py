"""The served models and their tokenizers, which are loaded when a card first names them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from bus.messages import InstanceCard
from bus.tokenizer_folder import TokenizerError
from gateway.delivery.cluster import Cluster
from gateway.errors import ApiError, no_such_model, unavailable
from gateway.text.tokenizer import Tokenizer

log = logging.getLogger("gateway")


class Models:
    """Tokenizers by folder. One that failed to load is tried again at the next request."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loads: dict[str, asyncio.Task[Tokenizer]] = {}
        self._served: set[str] = set()  # folders

    def preload(self) -> None:
        """Start to load what the cards name, so that the first request does not wait.

        A folder that nobody serves may get other files: it is read again when nobody serves it any more, and
        when somebody does again.
        """
        workers = self._cluster.workers.values()
        served = {card.model_path for worker in workers for card in worker.instances}
        for path in self._served ^ served:
            self._loads.pop(path, None)  # calls that wait for it still get it
        self._served = served
        for card in self._cluster.cards.values():
            if card.model_path not in self._loads:
                self._start(card)

    def card(self, model: str) -> InstanceCard:
        """Return the card of a served model. Raises ApiError: 404, or 503 while a worker may load it."""
        card = self._cluster.cards.get(model)
        if card is not None:
            return card
        if worker := self._cluster.loader_of(model):
            raise unavailable(f"worker {worker.id} is still loading ({worker.progress or 'starting'})", 2.0)
        if self._cluster.is_coming(model):
            raise unavailable(f"{model} is being loaded", 2.0)
        if model in self._cluster.awaited:
            raise unavailable(f"{model} is being deployed: {self._cluster.awaited[model]}", 2.0)
        known = self._cluster.known_models()
        if not known and not any(worker.state == "serving" for worker in self._cluster.workers.values()):
            raise unavailable("no worker has joined yet, so no model is served", 2.0)
        raise no_such_model(model, known)

    def is_loaded(self, card: InstanceCard) -> bool:
        load = self._loads.get(card.model_path)
        return load is not None and load.done() and not load.cancelled() and load.exception() is None

    async def tokenizer(self, card: InstanceCard) -> Tokenizer:
        """Return the tokenizer of a model once it is loaded. Raises ApiError 503 if that fails."""
        load = self._loads.get(card.model_path) or self._start(card)
        try:
            return await asyncio.shield(load)
        except TokenizerError as error:
            message = f"the tokenizer of {card.model!r} cannot be used: {error}"
            raise ApiError(503, message, code="no_tokenizer") from error

    def _start(self, card: InstanceCard) -> asyncio.Task[Tokenizer]:
        load = asyncio.create_task(asyncio.to_thread(Tokenizer, Path(card.model_path), card.vocab_size))
        load.add_done_callback(lambda task: self._loaded(card, task))
        self._loads[card.model_path] = load
        return load

    def _loaded(self, card: InstanceCard, task: asyncio.Task[Tokenizer]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("no tokenizer for %s: %s", card.model, error)
            if self._loads.get(card.model_path) is task:
                del self._loads[card.model_path]

    def close(self) -> None:
        for load in self._loads.values():
            load.cancel()
