"""The names of all Redis keys."""

from __future__ import annotations

GROUP = "workers"  # the consumer group of every requests:{instance} stream

# Most entries that writers leave in a stream: enough for the longest pause of a reader. `moments`, `events`
# are history, too: 15 minutes of one a second (a new load begins all the time) and of ten a second.
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


def consumer(worker: str, epoch: int) -> str:
    """Return the consumer name of one incarnation of a worker."""
    return f"{worker}:{epoch}"


class Names:
    """All keys with one prefix (setting redis.prefix), which separates several clusters on one server."""

    def __init__(self, prefix: str = "instar:") -> None:
        self.prefix = prefix
        self.telemetry = f"{prefix}telemetry"
        self.metrics = f"{prefix}metrics"
        self.moments = f"{prefix}moments"
        self.demand = f"{prefix}demand"
        self.events = f"{prefix}events"
        self.orders = f"{prefix}orders"
        self.dead_letters = f"{prefix}dead-letters"
        self.workers = f"{prefix}workers"  # set of the workers that joined and did not leave
        self.policy = f"{prefix}policy"  # the morph policy, one message; without it the defaults hold
        self.catalogue = f"{prefix}catalogue"  # set of the keys of all models, deployments and profiles
        self.leader = f"{prefix}leader"  # term and name of the last controller that led
        self.leader_lease = f"{prefix}leader-lease"  # the same, while it leads
        self.boot = f"{prefix}boot"  # marks the data set: another marker means that the data was lost
        self.schema = f"{prefix}schema"  # version of the schema that all processes write (`bus.schema`)

    def requests(self, instance: str) -> str:
        return f"{self.prefix}requests:{instance}"

    def control(self, worker: str) -> str:
        return f"{self.prefix}control:{worker}"

    def tokens(self, gateway: str) -> str:
        return f"{self.prefix}tokens:{gateway}"

    def lease(self, worker: str) -> str:
        """Return the key of a live worker's epoch, which expires when the worker stops renewing it."""
        return f"{self.prefix}lease:{worker}"

    def card(self, worker: str) -> str:
        return f"{self.prefix}card:{worker}"

    def gateway_lease(self, gateway: str) -> str:
        """Return the key of a live gateway, which holds the versions of the schema that it reads."""
        return f"{self.prefix}gateway:{gateway}"

    def reads(self, process: str) -> str:
        """Return the key of the versions that a monitor or controller reads; it expires."""
        return f"{self.prefix}reads:{process}"

    def answer(self, order: str) -> str:
        """Return the key of the controller's answer to an order, which expires."""
        return f"{self.prefix}answer:{order}"

    def model(self, name: str) -> str:
        return f"{self.prefix}model:{name}"

    def deployment(self, deployment: str) -> str:
        return f"{self.prefix}deployment:{deployment}"

    def profile(self, model: str, device: str) -> str:
        """Return the key of a model's profile on one kind of device (`WorkerCard.kind`)."""
        return f"{self.prefix}profile:{model}:{device}"

    def limit(self, stream: str) -> int | None:
        """Return the most entries that writers leave; None: only readers trim (pending, unread entries)."""
        return LIMITS.get(stream.removeprefix(self.prefix).partition(":")[0])
