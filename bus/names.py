"""The names of all Redis keys. A prefix separates several clusters, and tests, on one server."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "workers"  # the consumer group of every requests:{instance} stream


def consumer(worker: str, epoch: int) -> str:
    """Return the consumer name of one incarnation of a worker."""
    return f"{worker}:{epoch}"


@dataclass(frozen=True, slots=True)
class Names:
    """All keys with one prefix (setting redis.prefix)."""

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
        """The set of workers that joined and did not leave; the leases say which are alive."""
        return f"{self.prefix}workers"

    def lease(self, worker: str) -> str:
        """Return the key of a live worker's epoch, which expires when the worker stops renewing it."""
        return f"{self.prefix}lease:{worker}"

    def card(self, worker: str) -> str:
        return f"{self.prefix}card:{worker}"

    def gateway_lease(self, gateway: str) -> str:
        return f"{self.prefix}gateway:{gateway}"

    @property
    def policy(self) -> str:
        """The morph policy, one message. Without it the defaults hold."""
        return f"{self.prefix}policy"

    @property
    def orders(self) -> str:
        return f"{self.prefix}orders"

    def answer(self, order: str) -> str:
        """Return the key of the controller's answer to an order, which expires."""
        return f"{self.prefix}answer:{order}"

    @property
    def catalogue(self) -> str:
        """The set of the keys of all models, deployments and profiles."""
        return f"{self.prefix}catalogue"

    def model(self, name: str) -> str:
        return f"{self.prefix}model:{name}"

    def deployment(self, deployment: str) -> str:
        return f"{self.prefix}deployment:{deployment}"

    def profile(self, model: str, device: str) -> str:
        """Return the key of a model's profile on one kind of device (`WorkerCard.kind`)."""
        return f"{self.prefix}profile:{model}:{device}"

    @property
    def boot(self) -> str:
        """A marker of the data set: another marker means that the data was lost (FLUSHALL, empty replica)."""
        return f"{self.prefix}boot"

    def limit(self, stream: str) -> int | None:
        """Return how many entries writers leave in a stream.

        None: only readers trim it, because an entry may be pending (requests) or unread (tokens).
        """
        kind = stream.removeprefix(self.prefix).partition(":")[0]
        return LIMITS.get(kind)


# Entries of a stream that readers follow: enough for the longest pause of a reader. Two streams are history
# too. `moments` covers 15 minutes even if a new load begins all the time, which makes one a second; `events`
# covers 15 minutes of ten a second.
LIMITS = {
    "control": 4096,
    "telemetry": 2048,
    "metrics": 16,
    "moments": 900,
    "demand": 256,
    "orders": 256,  # the controller deletes those that it has answered
    "events": 10_000,
    "dead-letters": 256,
}
