"""The versions of the messages' schema: what differs between them, and which one is written. Pure.

A process reads all versions in READS, and writes the one that the key `schema` names: the newest that all
processes read that are present. The controller sets it (`common_version`). So processes of the release before
and of this one work side by side while they are replaced; docs/upgrade.md has the order.

Version 1 is that of release 0.1, version 2 that of release 0.2. An entry in version 1 may have fields of
version 2, which a process of version 1 ignores; only what it would refuse or misread is changed here. The
functions take the fields of a message as msgpack has them, return others, and leave what they do not know to
the decoder, which refuses it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from bus.histogram import bucket_of
from bus.messages import READS, SCHEMA_VERSION, RejectReason, SamplingParams, Submit

FIRST: Final = 1  # what a data set without the key `schema` is in
Fields = dict[str, Any]
Change = Callable[[Fields], Fields]

# Histograms of version 1 count by upper bounds, in seconds; those of release 0.1 for the first token.
BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_LAST_BUCKETS: Final = [bucket_of(bound) for bound in BOUNDS]  # of each bound, in version 2
HISTOGRAMS: Final = ("queue_seconds", "step_seconds", "time_to_first_token", "time_per_output_token")
_REASONS: Final = frozenset(map(str, RejectReason))


def lift_histogram(fields: Fields) -> Fields:
    """Put what is counted between two bounds into the bucket of their mean; above the last, into its own."""
    bounds, counts = fields.get("bounds"), fields.get("counts")
    if not (isinstance(bounds, list) and isinstance(counts, list) and len(counts) <= len(bounds) + 1):
        return fields
    if not all(isinstance(one, int | float) for one in (*bounds, *counts)):
        return fields
    edges = [0.0, *bounds, *bounds[-1:]] if bounds else [0.0, 0.0]
    found: dict[int, int] = {}
    for index, amount in enumerate(counts):
        if amount:
            bucket = bucket_of((edges[index] + edges[index + 1]) / 2)
            found[bucket] = found.get(bucket, 0) + amount
    return {"counts": found, "total": fields.get("total", 0.0)}


def lower_histogram(fields: Fields) -> Fields:
    """Count by BOUNDS."""
    counts = [0] * (len(BOUNDS) + 1)
    for bucket, amount in fields["counts"].items():
        counts[bisect_left(_LAST_BUCKETS, bucket)] += amount
    return {"bounds": list(BOUNDS), "counts": counts, "total": fields["total"]}


def lift_delta(fields: Fields) -> Fields:
    """Make a `reject_reason` of the word with which the error begins."""
    reason, colon, text = str(fields.get("error") or "").partition(":")
    if not colon or reason not in _REASONS:
        return fields
    return fields | {"reject_reason": reason, "error": text.strip() or None}


def lower_delta(fields: Fields) -> Fields:
    """Begin the error with its `reject_reason`."""
    reason = fields["reject_reason"]
    return fields if reason is None else fields | {"error": f"{reason}: {fields['error'] or ''}"}


def lift_card(fields: Fields) -> Fields:
    """Show a worker that reads version 1 alone as one that joins no group and no pipeline.

    Its links to other workers speak another protocol.
    """
    if "reads" in fields:
        return fields
    alone = _each(fields, "instances", lambda card: card | {"degrees": [1]})
    return alone | {"reads": [1], "link": "", "link_key": b""}


def lower_card(fields: Fields) -> Fields:
    """Leave out the link: workers that read version 1 alone would try to reach it."""
    return fields | {"link": "", "link_key": b""}


def lower_report(fields: Fields) -> Fields:
    """Leave out the numbers at the end of a morph, whose form depends on the version."""
    return fields | {"telemetry": None}


def lift_measure(fields: Fields) -> Fields:
    """Leave out a peer to measure links with, of which version 1 has the address of another protocol."""
    peer = fields.get("peer")
    return fields | {"peer": None} if isinstance(peer, dict) and "link" not in peer else fields


def lower_measure(fields: Fields) -> Fields:
    """Leave out the peer: links are not measured."""
    return fields | {"peer": None}


def _each(fields: Fields, name: str, change: Change) -> Fields:
    """Change every map of a list of maps."""
    found = fields.get(name)
    if not isinstance(found, list):
        return fields
    return fields | {name: [change(one) if isinstance(one, dict) else one for one in found]}


def _histograms(change: Change) -> Change:
    """Return a change of all histograms of an instance's telemetry."""

    def changed(fields: Fields) -> Fields:
        found = {name: fields[name] for name in HISTOGRAMS if isinstance(fields.get(name), dict)}
        return fields | {name: change(one) for name, one in found.items()}

    return changed


def _last(change: Change) -> Change:
    """Return a change of the telemetry within an instance's metrics."""
    return lambda fields: (
        fields | {"last": change(fields["last"])} if isinstance(fields.get("last"), dict) else fields
    )


def _all(name: str, change: Change) -> Change:
    return lambda fields: _each(fields, name, change)


# By version, then by type: from that version to the next one, and from the next one to it.
UPGRADES: Final[Mapping[int, Mapping[str, Change]]] = {
    1: {
        "WorkerTelemetry": _all("instances", _histograms(lift_histogram)),
        "Metrics": _all("instances", _last(_histograms(lift_histogram))),
        "StepOutput": _all("deltas", lift_delta),
        "WorkerCard": lift_card,
        "Measure": lift_measure,
    },
}
DOWNGRADES: Final[Mapping[int, Mapping[str, Change]]] = {
    1: {
        "WorkerTelemetry": _all("instances", _histograms(lower_histogram)),
        "Metrics": _all("instances", _last(_histograms(lower_histogram))),
        "StepOutput": _all("deltas", lower_delta),
        "WorkerCard": lower_card,
        "MorphReport": lower_report,
        "Measure": lower_measure,
    },
}


def lifts(version: int, name: str) -> list[Change]:
    """Return the changes that make a message of `version` one of SCHEMA_VERSION, in their order."""
    steps = range(version, SCHEMA_VERSION)
    return [UPGRADES[step][name] for step in steps if name in UPGRADES[step]]


def lowerings(version: int, name: str) -> list[Change]:
    """Return the changes that make a message of SCHEMA_VERSION one of `version`, in their order."""
    steps = range(SCHEMA_VERSION - 1, version - 1, -1)
    return [DOWNGRADES[step][name] for step in steps if name in DOWNGRADES[step]]


def entries_of(message: object, version: int) -> list[object]:
    """Return the messages of which the entries are, if they are written in `version`.

    A `Submit` of version 1 is one request: its choices are entries of their own.
    """
    return list(message.each()) if version < 2 and isinstance(message, Submit) else [message]


def version_needed(sampling: SamplingParams, *, embeds: bool) -> int:
    """Return the oldest version that has what a request asks for: a worker would ignore fields it lacks.

    A form of the answer is not counted: cards tell it (`InstanceCard.takes_grammars`).
    """
    is_new = embeds or sampling.repetition_penalty != 1 or sampling.min_tokens > 0
    return 2 if is_new else FIRST


def in_words(versions: Iterable[int]) -> str:
    """Return versions for people and for Redis: "1 and 2"; "none" without any."""
    words = [str(version) for version in versions]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words) or "none"


def parsed(text: bytes) -> tuple[int, ...]:
    """Return the versions that `in_words` wrote; of a gateway of release 0.1, whose lease is "1": (1,)."""
    words = text.replace(b",", b" ").replace(b"and", b" ").split()
    return tuple(int(word) for word in words if word.isdigit())


def common_version(written: int, readers: Iterable[tuple[int, ...]], *, has_monitor: bool) -> int | None:
    """Return the version to write: the newest that all readers and this program read; None if there is none.

    has_monitor: a monitor shows what it reads. Without one it may be of release 0.1, which shows nothing, so
    a newer version than the one that is `written` is not begun.
    """
    common = set(READS).intersection(*map(set, readers))
    if not has_monitor:
        common = {version for version in common if version <= written}
    return max(common, default=None)
