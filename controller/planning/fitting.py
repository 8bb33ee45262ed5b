"""Layers onto devices: as evenly as they fit, adjacent ones together (iServe §6). Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bus.deployments import Configuration
from bus.groups import natural
from bus.messages import Stage
from bus.pages import pages_for
from controller.planning.memory import Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A worker that layers may be placed on. All devices of one call are of the profile's kind."""

    worker: str
    host: str = ""  # ranks of one stage share it
    free_bytes: int  # room for new layers and their KV
    load: float = 0.0  # busy seconds in the window over the window, 0..1
    page_bytes: int = 1  # a layer takes whole pages
    instances: frozenset[str] = frozenset()  # all there: with any, it cannot join a group that may part
    ranks: frozenset[str] = frozenset()  # instances there that are ranks: two groups would deadlock


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a configuration does not fit on the freest devices."""

    reason: str
    is_sure: bool = True  # True: no other workers fit either; False: another choice of ranks might


def fit(
    need: Footprint, configuration: Configuration, num_layers: int, devices: Iterable[Device]
) -> list[Stage] | Refusal:
    """Return the stages on the tp x pp freest devices, each tried as the leader, or why there are none."""
    rows = freest(need, configuration, devices)
    return rows if isinstance(rows, Refusal) else partition(need, num_layers, rows)


def freest(
    need: Footprint, configuration: Configuration, devices: Iterable[Device]
) -> list[list[Device]] | Refusal:
    """Return pp rows of tp devices of one host each; a row holds as much as its fullest device."""
    usable = sorted(devices, key=_freest_first)
    if configuration.tp > 1:
        usable = [one for one in usable if not (one.ranks if need.is_fixed else one.instances)]
    hosts: dict[str, list[Device]] = defaultdict(list)
    for one in usable:
        hosts[one.host if configuration.tp > 1 else ""].append(one)
    tp = configuration.tp
    rows = [there[i : i + tp] for there in hosts.values() for i in range(0, len(there) - tp + 1, tp)]
    rows.sort(key=_by_fullest)
    if len(rows) < configuration.pp:
        if tp == 1:
            return Refusal(f"needs {configuration.pp} devices, there are {len(rows)}")
        which = "are in no other group" if need.is_fixed else "have no other model"
        groups = f"group{'s' * (configuration.pp > 1)} of {tp} devices of one host that {which}"
        return Refusal(f"needs {configuration.pp} {groups}; {len(rows)} can be formed")
    return rows[: configuration.pp]


def partition(need: Footprint, num_layers: int, rows: Sequence[Sequence[Device]]) -> list[Stage] | Refusal:
    """Return the stages by layers. Devices of a host are dealt out anew if that helps the leader."""
    if num_layers < len(rows):
        return Refusal(f"{num_layers} layers do not make {len(rows)} stages")
    could_hold = sum(min(_layers(need, one, leads=False) for one in row) for row in rows)
    for order in _orders(rows) if could_hold >= num_layers else ():
        most = capacities(need, order)
        if min(most) >= 1 and sum(most) >= num_layers:
            return _stages(order, even(num_layers, most), need)
    is_sure = could_hold < num_layers or len(rows[0]) == 1
    return replace(_refused(need, num_layers, rows), is_sure=is_sure)


def _orders(rows: Sequence[Sequence[Device]]) -> Iterator[list[list[Device]]]:
    """Yield orders in which each device leads once with each set of ranks that is worth a try.

    A row holds as much as its fullest device, so the best rows are neighbours in size, and the leader's ranks
    are a run between two of these.
    """
    tp = len(rows[0])
    for row in rows:
        mates = [one for other in rows for one in other if tp == 1 or one.host == row[0].host]
        elsewhere = [list(other) for other in rows if tp > 1 and other[0].host != row[0].host]
        for leader in row:
            left = sorted((one for one in mates if one is not leader), key=_freest_first)
            for at in range(0, len(left) + 1, tp) if tp > 1 else (0,):
                rest = left[:at] + left[at + tp - 1 :]
                others = elsewhere + [rest[i : i + tp] for i in range(0, len(rest), tp)]
                yield [[leader, *left[at : at + tp - 1]], *sorted(others, key=_by_fullest)]


def _freest_first(one: Device) -> tuple[object, ...]:
    return -one.free_bytes, natural(one.worker)


def _by_fullest(row: Sequence[Device]) -> tuple[object, ...]:
    return -row[-1].free_bytes, natural(row[0].worker)


def _refused(need: Footprint, num_layers: int, rows: Sequence[Sequence[Device]]) -> Refusal:
    needed = need.lead_bytes + len(rows) * need.device_bytes + num_layers * need.layer_bytes
    available = sum(min(one.free_bytes for one in row) for row in rows)
    most = capacities(need, rows)
    where = " on each of its ranks" if len(rows[0]) > 1 else ""
    return Refusal(
        f"needs {sized(needed)}{where} for {num_layers} layers, {sized(available)} are free on "
        f"{', '.join(one.worker for row in rows for one in row)}, which hold {max(0, sum(most))} layers"
    )


def capacities(need: Footprint, rows: Sequence[Sequence[Device]]) -> list[int]:
    """Return the layers that each row has room for; below 0: no room beside them. The first device leads."""
    return [
        min(
            _layers(need, one, leads=i == 0 and (j == 0 or need.every_rank_leads))
            for j, one in enumerate(row)
        )
        for i, row in enumerate(rows)
    ]


def _layers(need: Footprint, device: Device, *, leads: bool) -> int:
    rest = device.free_bytes - _paged(need.of(0, leads=leads), device)
    return rest // max(1, _paged(need.layer_bytes, device))


def even(num_layers: int, most: Sequence[int]) -> list[int]:
    """Share layers as evenly as the limits allow. Later stages get the rest: the first has more to do."""
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


def _stages(rows: Sequence[Sequence[Device]], shares: Sequence[int], need: Footprint) -> list[Stage]:
    """Return the stages, workers in the order of their names but for a leader that alone has room to lead."""
    stages: list[Stage] = []
    first = 0
    for row, share in zip(rows, shares, strict=True):
        workers = sorted((one.worker for one in row), key=natural)
        if not stages and not need.every_rank_leads:
            workers.sort(key=lambda name: name != row[0].worker)
        stages.append(Stage(workers=workers, first=first, end=first + share))
        first += share
    return stages


def _paged(size: int, device: Device) -> int:
    return pages_for(size, device.page_bytes) * device.page_bytes


UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def sized(num_bytes: float) -> str:
    """Return bytes in the largest unit of which there is one: "95 bytes", "12.3 MiB"."""
    left, unit = float(num_bytes), 0
    while abs(left) >= 1024 and unit < len(UNITS) - 1:
        left, unit = left / 1024, unit + 1
    return f"{left:.1f} {UNITS[unit]}" if unit else f"{left:.0f} {UNITS[0]}"
