"""Swaps whose bytes come from a disk through the bounded ring, against the disk's own speed.

    python -m bench.morph disk [--quick] [--threads 2] [--disk-dir /var/tmp]

A worker on the CPU in float32, on a model of four wide layers (200M parameters). Its host memory for variants
(ring, sums and outputs) is at most a quarter of the variants' bytes; a layer comes again only after the
others, so that what it needs is no longer in the ring.

Disk: before and after each swap the bytes that it copies are read from the same file, in blocks of 4 and of
16 MiB, by one thread and by two, with O_DIRECT into touched memory of the ring's size; the fastest of the
eight is the disk's own speed. Bar: an idle swap of all layers at least 0.8 of it, from the command to the
end.

Steps: as in `bench.morph cost`, one layer after the other. Bar: under 5 % longer. Before, the same with all
variants in memory.

Ways to read: the same bytes with O_DIRECT, through the page cache and through a mapping, each with the
processor's time that it takes. No bar.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import kernels  # noqa: F401 before torch: it settles how torch's threads wait
from bench.common.results import Bar, bar, conclude, digits, parser, say, say_bars

# isort: split
from bench.common.engines import silence
from bench.morph.cost import SIZES, WAYS, MorphLoop, serving
from bench.morph.cost_report import STEP_BAR, steps_report
from bus.messages import PARTS
from bus.morphs import MorphReport
from worker.shape.host_store import DiskStore

Spans = list[tuple[int, int]]  # offset and length of parts of a file

MIB: Final = 1 << 20
BLOCKS: Final = (4 * MIB, 16 * MIB)
READERS: Final = (1, 2)
LEAST_BYTES: Final = 512 * MIB  # that are read to measure the disk
DISK_BAR, SHARE_BAR, FROM_DISK_BAR = 0.8, 0.25, 0.9
RING_MB = 190  # under a quarter of the variants, with the sums and outputs beside it


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="2 swaps each way, 4 beside steps")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--disk-dir", default="/var/tmp")
    args = options.parse_args()
    silence()
    with tempfile.TemporaryDirectory(prefix="instar-bench-", dir=args.disk_dir) as folder:
        found = measure(folder, args.threads, 2 if args.quick else 6, 4 if args.quick else 16)
    for name, value in found.items():
        say(f"{name}: {value}")
    judged = bars(found)
    say_bars(judged)
    result = {"bench": "morph_disk", **found, "bars": judged, "quick": args.quick, "threads": args.threads}
    return conclude(result, is_kept=not args.quick, bars=judged)


def measure(folder: str, threads: int, num_idle: int, num_beside: int) -> dict[str, Any]:
    """Return the numbers; `num_idle` swaps each way of the whole model, `num_beside` swaps of a layer."""
    wide = SIZES[1]
    layers = list(range(4))
    in_turn = [(way, [layer]) for way in WAYS for layer in layers]
    with serving(wide, threads) as morphs:
        for way in WAYS:
            morphs.swap(way, layers)
        from_memory = morphs.beside(in_turn[number % 8] for number in range(num_beside))
    with serving(wide, threads, host_memory_mb=RING_MB, disk_dir=folder) as morphs:
        store = morphs.variants.store
        assert isinstance(store, DiskStore) and morphs.loaded.memory.ring
        for way in WAYS:
            morphs.swap(way, layers)  # afterwards all pages have memory, and products were checked
        idle = [idle_swap(morphs, store, way, layers) for _ in range(num_idle) for way in WAYS]
        ways = ways_to_read(store.path)
        parts = morphs.beside(in_turn[number % 8] for number in range(num_beside))
        beside = [part.swap for part in parts if part.swap]
        return {
            "variants_mb": round(store.nbytes / 1e6, 1),
            "host_memory_mb": round((morphs.loaded.memory.ring.nbytes + store.kept_bytes) / 1e6, 1),
            "page_cache_mb": round(cached_bytes(store.path) / 1e6, 1),
            "idle": {f"to {way}": summary(idle[number :: len(WAYS)]) for number, way in enumerate(WAYS)},
            "from_disk_beside_steps": digits(from_disk(beside)),
            "steps": steps_report(parts),
            "steps_from_memory": steps_report(from_memory),
            "ways_to_read": ways,
        }


def idle_swap(morphs: MorphLoop, store: DiskStore[Any], way: Any, layers: list[int]) -> dict[str, float]:
    """Measure the disk, a swap of an idle engine, and the disk again; speeds in MB/s."""
    images = [store.place((layer, part, way, "weights")) for layer in layers for part in PARTS]
    nbytes = sum(length for _, length in images)
    many = images * -(-LEAST_BYTES // nbytes)  # a disk with a limit lets more through for a moment

    def disk_alone() -> float:
        ways = itertools.product(BLOCKS, READERS)
        return (
            max(len(many) // len(images) * nbytes / read_direct(store.path, many, *way) for way in ways) / 1e6
        )

    before = disk_alone()
    numbers = morphs.swap(way, layers).numbers
    disk = max(before, disk_alone())
    swap = float(numbers["bytes_copied"]) / float(numbers["seconds"]) / 1e6
    share = float(numbers["bytes_from_disk"]) / float(numbers["bytes_copied"])
    took = ", ".join(f"{name} {numbers[f'{name}_seconds']} s" for name in ("disk", "copy", "boundary"))
    say(
        f"to {way}: {nbytes / 1e6:.0f} MB at {swap:.0f} MB/s, {share:.0%} from disk ({took} of"
        f" {numbers['seconds']} s); the disk {before:.0f} MB/s before and {disk:.0f} at most"
    )
    return {"swap_mb_s": swap, "disk_mb_s": disk, "ratio": swap / disk, "from_disk": share}


def summary(swaps: list[dict[str, float]]) -> dict[str, float | None]:
    return {name: digits(statistics.median(one[name] for one in swaps)) for name in swaps[0]}


def from_disk(swaps: list[MorphReport]) -> float:
    """Return the share of the bytes that came from the disk."""
    copied = sum(float(one.numbers["bytes_copied"]) for one in swaps)
    return sum(float(one.numbers["bytes_from_disk"]) for one in swaps) / copied


def bars(found: dict[str, Any]) -> dict[str, Bar]:
    share = found["host_memory_mb"] / found["variants_mb"]
    longer = found["steps"]["steps_longer"]
    judged = {
        "host memory, of the variants": bar(f"<= {SHARE_BAR}", share, share <= SHARE_BAR),
        "steps beside swaps, longer by": bar(f"< {STEP_BAR}", longer, longer < STEP_BAR),
    }
    for way, one in found["idle"].items():
        is_met = one["ratio"] >= DISK_BAR and one["from_disk"] >= FROM_DISK_BAR
        judged[f"swap {way}, of the disk's speed"] = bar(f">= {DISK_BAR}", one["ratio"], is_met)
    return judged


# ------------------------------------------------------------------------------------- the disk alone


def read_direct(path: Path, spans: Spans, block: int = BLOCKS[0], readers: int = 2) -> float:
    """Return the seconds of reading with O_DIRECT, by several threads at once."""
    return _read(path, spans, block, os.O_DIRECT, readers)


def read_cached(path: Path, spans: Spans) -> float:
    """Return the seconds of reading through the page cache, which does not have the file."""
    return _read(path, spans, BLOCKS[0], 0)


def read_mapped(path: Path, spans: Spans) -> float:
    """Return the seconds of copying out of a mapping of the file."""
    nbytes, target = path.stat().st_size, mmap.mmap(-1, BLOCKS[0])
    with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY) as mapped:
        source = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        to = ctypes.addressof(ctypes.c_char.from_buffer(target))
        began = time.perf_counter()
        for first, length in spans:
            for at in range(first, first + length, BLOCKS[0]):
                ctypes.memmove(to, source + at, min(BLOCKS[0], first + length - at))
        return time.perf_counter() - began


def _read(path: Path, spans: Spans, block: int, flags: int, readers: int = 1) -> float:
    """Read into memory of the ring's size: the disk's controller may write into caches if it is small."""
    pieces = [
        (at, min(block, -(-(first + length - at) // 4096) * 4096))
        for first, length in spans
        for at in range(first, first + length, block)
    ]
    left, fd = iter(pieces), os.open(path, os.O_RDONLY | flags)
    target = memoryview(_memory())
    places = itertools.cycle(range(0, len(target) - block + 1, block))

    def read() -> None:
        for at, nbytes in left:
            place = next(places)
            os.preadv(fd, [target[place : place + nbytes]], at)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - began
    os.close(fd)
    return took_s


@functools.cache
def _memory() -> mmap.mmap:
    memory = mmap.mmap(-1, RING_MB * MIB)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(len(memory))
    return memory


READS: Final[dict[str, Callable[[Path, Spans], float]]] = {
    "O_DIRECT": read_direct,
    "page cache": read_cached,
    "mapping": read_mapped,
}


def ways_to_read(path: Path) -> dict[str, dict[str, float | None]]:
    """Return the speed of each way, and the processor's seconds for a GB. The page cache is empty before."""
    nbytes = path.stat().st_size // BLOCKS[1] * BLOCKS[1]
    speeds: dict[str, list[float]] = {name: [] for name in READS}
    busy: dict[str, list[float]] = {name: [] for name in READS}
    for _ in range(4):  # in turn, and the first round does not count: what is below may have a cache too
        for name, read in READS.items():
            _drop(path)
            began = time.process_time()
            speeds[name].append(nbytes / read(path, [(0, nbytes)]) / 1e6)
            busy[name].append((time.process_time() - began) / nbytes * 1e9)
    _drop(path)
    return {
        name: {
            "mb_s": digits(statistics.median(speeds[name][1:])),
            "cpu_s_per_gb": digits(statistics.median(busy[name][1:])),
        }
        for name in READS
    }


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached_bytes(path: Path) -> int:
    """Return how much of the file lies in the page cache."""
    nbytes = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(nbytes), pages):
            raise OSError(ctypes.get_errno(), "mincore")
        del view
        return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE
