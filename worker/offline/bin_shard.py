"""Safetensors of one .bin file: `python -m worker.offline.bin_shard FILE PREFIX GROUP MEMORY SECONDS`.

The file is a pickle. torch's restricted unpickler reads it, which makes tensors and runs no code, in this
process, whose memory (in bytes), output and time are limited. Tensors go to PREFIX-001.safetensors,
PREFIX-002... of about GROUP bytes. A line of JSON is printed for each: its name, and the bytes of each tensor
in it.
"""

from __future__ import annotations

import errno
import json
import pickle
import resource
import signal
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

REFUSED: Final = 3  # exit status: the file will be refused again
FAILED: Final = 4  # exit status: a disk failed or is full
MOST_COPIES: Final = 4  # bytes made of one of the file: tied weights are stored once
_MALFORMED = (EOFError, ValueError, LookupError, TypeError, AttributeError, struct.error)
_HEADER_BYTES = 100 << 20  # the format's limit
_MOST_SHOWN = 100  # characters of a name


class Refused(Exception):
    """The file is not converted: the text says why."""


def read_bin(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file without running code of it. Raises Refused, OSError, MemoryError."""
    try:
        # A file of torch before 1.6 is no zip archive and cannot be mapped.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise Refused(
            f"it holds more than tensors: {_what(str(error))}; code in a file is never run"
        ) from error
    except (*_MALFORMED, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: it points outside itself
            raise
        raise Refused(f"it cannot be read: {(str(error) or repr(error)).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise Refused(f"it holds a {type(found).__name__}, not tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise Refused(f"{shown(name)} in it is a {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise Refused(
                f"{shown(name)} in it is {tensor.layout} {tensor.dtype};"
                " only plain dense tensors are supported"
            )
    if not found:
        raise Refused("it holds no tensors")
    size, whole = path.stat().st_size, sum(tensor.nbytes for tensor in found.values())
    if whole > MOST_COPIES * size:
        raise Refused(
            f"its tensors have {whole} bytes and it has {size}; at most {MOST_COPIES} times as many are made,"
            " since weights that are tied are stored once"
        )
    return found


def shown(name: object) -> str:
    """Return a name out of a file for a message, cut if it is long."""
    text = repr(name)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def grouped(tensors: dict[str, torch.Tensor], group_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors in order, in groups of at most `group_bytes`, or of one larger tensor."""
    group: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if group and sum(t.nbytes for t in group.values()) + tensor.nbytes > group_bytes:
            yield group
            group = {}
        group[name] = tensor
    yield group


def main() -> int:
    source, prefix = Path(sys.argv[1]), Path(sys.argv[2])
    group_bytes, memory_bytes = int(sys.argv[3]), int(sys.argv[4])
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[5]))  # it ends this process, whoever waits for it
    # Beyond what importing torch took: a library for GPUs maps gigabytes of addresses.
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    try:
        most = MOST_COPIES * source.stat().st_size + _HEADER_BYTES
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        for number, group in enumerate(grouped(read_bin(source), group_bytes), 1):
            path = prefix.with_name(f"{prefix.name}-{number:03}.safetensors")
            # Tied weights share memory, which the library refuses: each gets its own.
            save_file(_copied(group), path, {"format": "pt"})
            path.chmod(0o644)  # the library makes files that only their owner can read
            sizes = {name: tensor.nbytes for name, tensor in group.items()}
            sys.stdout.write(json.dumps({"file": path.name, "tensors": sizes}) + "\n")
            sys.stdout.flush()
    except Refused as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    except MemoryError:
        sys.stderr.write(f"it does not fit in {memory_bytes >> 20} MiB beside torch\n")
        return REFUSED
    except (OSError, SafetensorError) as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    return 0


def _copied(group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of each tensor. Raises MemoryError."""
    try:
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in group.items()}
    except RuntimeError as error:  # so torch says that there is no memory
        raise MemoryError from error


def _what(error: str) -> str:
    """Return the line of torch's error that names what the file wants to run."""
    lines = [line.strip() for line in error.splitlines()]
    return next((line for line in lines if "nsupported" in line or "GLOBAL" in line), lines[0]).split(". ")[0]


if __name__ == "__main__":
    sys.exit(main())
