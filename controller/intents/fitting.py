"""Layers onto devices: uneven where needed, even where possible, adjacent ones together (iServe §6). Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bus.deployments import Configuration
from bus.messages import Stage
from bus.shapes import natural
from controller.intents.memory import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A worker, as placing sees it. All devices of one call are of the kind that the profile is of."""

    worker: str
    host: str = ""  # ranks of one stage share it
    free_bytes: int  # that new layers and their KV may take
    load: float = 0.0  # busy seconds in the window over the window, 0..1
    page_bytes: int = 1  # a layer takes whole pages
    is_empty: bool = True  # has no model: others cannot join a group


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why it does not fit. Bytes of the devices that were looked at, the freest there are."""

    reason: str
    needed_bytes: int = 0
    available_bytes: int = 0


def fit(
    need: Need, configuration: Configuration, num_layers: int, devices: Iterable[Device]
) -> list[Stage] | Refusal:
    """The stages on the K = tp x pp freest devices. If any partition of the layers over these exists, one is
    found: the first stage, which has more to hold, is tried on each."""
    rows = freest(configuration, devices)
    if isinstance(rows, Refusal):
        return rows
    return partition(need, num_layers, rows)


def freest(configuration: Configuration, devices: Iterable[Device]) -> list[list[Device]] | Refusal:
    """pp rows of tp devices each: of a row all are of one host, and what it can hold its fullest can."""
    usable = sorted(devices, key=lambda one: (-one.free_bytes, natural(one.worker)))
    if configuration.tp > 1:
        usable = [one for one in usable if one.is_empty]
    hosts: dict[str, list[Device]] = defaultdict(list)
    for one in usable:
        hosts[one.host if configuration.tp > 1 else ""].append(one)
    tp = configuration.tp
    rows = [there[i : i + tp] for there in hosts.values() for i in range(0, len(there) - tp + 1, tp)]
    rows.sort(key=lambda row: (-row[-1].free_bytes, natural(row[0].worker)))
    if len(rows) < configuration.pp:
        kind = "devices" if tp == 1 else f"times {tp} devices of one host without another model"
        return Refusal(f"needs {configuration.pp} {kind}, there are {len(rows)}")
    return rows[: configuration.pp]


def partition(need: Need, num_layers: int, rows: Sequence[Sequence[Device]]) -> list[Stage] | Refusal:
    """Stages in the order of their layers; the row that leads comes first, the rest as given."""
    if num_layers < len(rows):
        return Refusal(f"{num_layers} layers do not make {len(rows)} stages")
    for lead in range(len(rows)):
        order = [rows[lead], *rows[:lead], *rows[lead + 1 :]]
        most = [capacity(need, row, leads=i == 0) for i, row in enumerate(order)]
        if min(most) >= 1 and sum(most) >= num_layers:
            return _stages(order, even(num_layers, most))
    needed = need.lead_bytes + len(rows) * need.device_bytes + num_layers * need.layer_bytes
    available = sum(min(one.free_bytes for one in row) for row in rows)
    most = [capacity(need, row, leads=i == 0) for i, row in enumerate(rows)]
    where = "" if len(rows) == len(rows[0]) == 1 else " on each of its ranks" if len(rows[0]) > 1 else ""
    return Refusal(
        f"needs {needed} bytes{where} for {num_layers} layers, {available} are free on "
        f"{', '.join(one.worker for row in rows for one in row)}, which hold {max(0, sum(most))} layers",
        needed,
        available,
    )


def capacity(need: Need, row: Sequence[Device], *, leads: bool) -> int:
    """Layers that every device of the row has room for; below 0 if not even the rest has."""
    return min(
        (one.free_bytes - _paged(need.of(0, leads=leads), one)) // max(1, _paged(need.layer_bytes, one))
        for one in row
    )


def even(num_layers: int, most: Sequence[int]) -> list[int]:
    """As even as the limits allow; what is left over goes to the last stages: the first has more to do."""
    shares = [0] * len(most)
    left = num_layers
    while left:
        open_stages = [i for i in range(len(most)) if shares[i] < most[i]]
        lowest = min(shares[i] for i in open_stages)
        level = [i for i in open_stages if shares[i] == lowest]
        for i in level[-left:]:
            shares[i] += 1
            left -= 1
    return shares


def _stages(rows: Sequence[Sequence[Device]], shares: Sequence[int]) -> list[Stage]:
    stages, first = [], 0
    for row, share in zip(rows, shares, strict=True):
        workers = sorted((one.worker for one in row), key=natural)
        stages.append(Stage(workers=workers, first=first, end=first + share))
        first += share
    return stages


def _paged(size: int, device: Device) -> int:
    return -(-size // device.page_bytes) * device.page_bytes
