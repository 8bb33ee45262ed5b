"""Names of every Redis key. A key prefix keeps several clusters (and tests) apart on one server."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "workers"  # the consumer group of every requests:{instance} stream


def consumer(worker: str, epoch: int) -> str:
    """The name under which one incarnation of a worker reads its instances' requests."""
    return f"{worker}:{epoch}"


@dataclass(frozen=True, slots=True)
class Names:
    """`prefix` comes from settings.redis.prefix, e.g. "instar:"."""

    prefix: str = "instar:"

    def requests(self, instance: str) -> str:
        return f"{self.prefix}requests:{instance}"

    def control(self, worker: str) -> str:
        return f"{self.prefix}control:{worker}"

    def tokens(self, gateway: str) -> str:
        return f"{self.prefix}tokens:{gateway}"

    @property
    def telemetry(self) -> str:
        return f"{self.prefix}telemetry"

    @property
    def metrics(self) -> str:
        return f"{self.prefix}metrics"

    @property
    def moments(self) -> str:
        return f"{self.prefix}moments"

    @property
    def demand(self) -> str:
        return f"{self.prefix}demand"

    @property
    def events(self) -> str:
        return f"{self.prefix}events"

    @property
    def dead_letters(self) -> str:
        return f"{self.prefix}dead-letters"

    @property
    def workers(self) -> str:
        """Set of worker ids that ever joined; who is alive is told by the leases."""
        return f"{self.prefix}workers"

    def lease(self, worker: str) -> str:
        """The epoch of a live worker as text; expires when the worker stops renewing it."""
        return f"{self.prefix}lease:{worker}"

    def card(self, worker: str) -> str:
        return f"{self.prefix}card:{worker}"

    def gateway_lease(self, gateway: str) -> str:
        return f"{self.prefix}gateway:{gateway}"

    @property
    def policy(self) -> str:
        """The morph policy, one message; without it the defaults hold."""
        return f"{self.prefix}policy"

    @property
    def orders(self) -> str:
        return f"{self.prefix}orders"

    def answer(self, order: str) -> str:
        """What the controller answered; expires."""
        return f"{self.prefix}answer:{order}"

    @property
    def catalogue(self) -> str:
        """Set of the keys of all models, deployments and profiles."""
        return f"{self.prefix}catalogue"

    def model(self, name: str) -> str:
        return f"{self.prefix}model:{name}"

    def deployment(self, deployment: str) -> str:
        return f"{self.prefix}deployment:{deployment}"

    def profile(self, model: str, device: str) -> str:
        """`device`: its kind, as `WorkerCard.device` without an index tells it, or a GPU's name."""
        return f"{self.prefix}profile:{model}:{device}"

    @property
    def boot(self) -> str:
        """A marker set once per data set: when it is gone, the data is gone (FLUSHALL, empty replica)."""
        return f"{self.prefix}boot"

    def limit(self, stream: str) -> int | None:
        """The most entries a stream keeps when its writers trim it. None: its readers do, because an entry
        may be pending (requests) or unread (tokens)."""
        kind = stream.removeprefix(self.prefix).partition(":")[0]
        return LIMITS.get(kind)


# Of the streams that are read as they grow: enough for the slowest reader's pause. Two are history, too:
# `moments` of 15 minutes, even where a load begins anew all the time and there are two in two seconds, and
# `events` of as long while they are fewer than ten a second.
LIMITS = {
    "control": 4096,
    "telemetry": 2048,
    "metrics": 16,
    "moments": 900,
    "demand": 256,
    "orders": 256,  # and none of them stays: the controller deletes what it has answered
    "events": 10_000,
    "dead-letters": 256,
}
