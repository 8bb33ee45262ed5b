"""What ranks and stages say to each other, in seconds, by the bytes they say. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bus.deployments import LinkKind, LinkSample
from controller.intents.uncertain import Uncertain, averaged, between, exactly, within


class Links:
    """From point to point by straight lines, of means: a token of a group takes dozens of sums, and a waking
    thread that is late now and then is late in every one of them. What was not measured takes nothing, which
    is assumed."""

    def __init__(self, samples: Iterable[LinkSample]) -> None:
        measured: dict[tuple[LinkKind, int], list[float]] = {}
        for one in samples:
            measured.setdefault((one.kind, one.nbytes), []).extend(one.seconds)
        self._points: dict[LinkKind, list[tuple[float, Uncertain]]] = {"all_reduce": [], "hop": []}
        for (kind, nbytes), seconds in sorted(measured.items()):
            if seconds:
                self._points[kind].append((float(nbytes), averaged(seconds)))

    def hop(self, nbytes: float) -> Uncertain:
        """From one stage to the next. 0 bytes: less than anything that was measured."""
        return self._seconds("hop", nbytes)

    def all_reduce(self, nbytes: float, tp: int) -> Uncertain:
        """Of so many ranks. A ring of them moves 2 (tp - 1) / tp times the bytes of each, for two once:
        nobody measured that, and it lies between what two take and that for each further rank."""
        pair = self._seconds("all_reduce", nbytes)
        if tp == 2:
            return pair
        more = within(pair.value, 2 * (tp - 1) / tp * pair.value, (tp - 1) * pair.value)
        return Uncertain(more.value, more.down + pair.down, more.up + (tp - 1) * pair.up, "assumed")

    def _seconds(self, kind: LinkKind, nbytes: float) -> Uncertain:
        points = self._points[kind]
        if not points:
            return exactly(0.0, "assumed")
        least, seconds = points[0]  # what a message takes however short it is
        return seconds if nbytes <= least else between(points, nbytes).at_least(seconds.value)
