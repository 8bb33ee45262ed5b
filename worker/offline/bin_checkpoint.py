"""`instar convert`: safetensors of a checkpoint of PyTorch's .bin files, the same tensors bit for bit.

Each file is read by a process of its own (`worker.offline.bin_shard`) with a limit of memory and time. The
result is made in a folder beside the target, which is renamed at the end, so that the target is whole or is
not there. Files of an interrupted run that are whole are kept and used by the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from worker.model.config import ModelError, read_config
from worker.offline.bin_shard import REFUSED
from worker.offline.progress import ProgressLine

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
GROUP_BYTES: Final = 2 << 30  # of a file that is written; while it is written, it is in memory twice
_SPARE_BYTES = 1 << 30
_LEAST_S, _BYTES_PER_S = 120.0, 10e6  # far below a disk's speed
_NOT_COPIED = (".bin", ".pt", ".pth", ".safetensors", ".safetensors.index.json", ".bin.index.json")


def convert_bin(source: Path, target: Path, group_bytes: int = GROUP_BYTES) -> None:
    """Make safetensors of the checkpoint in `source` in a new folder `target`.

    Raises ModelError: no such checkpoint, a target that exists, a file that holds anything but tensors or
    takes too much memory or time, tensors that the index names and no file has; OSError.
    """
    read_config(source)  # what could not be served is refused before any work
    shards = _shards(source)
    if target.exists():
        raise ModelError(f"{target}: exists already; name a new folder")
    unfinished = target.with_name(f".{target.name}.converting")
    with _locked(unfinished):
        progress = ProgressLine("convert", sum(_mib(path) for path in shards), "MiB")
        done = [
            _convert_shard(path, unfinished, number, group_bytes, progress)
            for number, path in enumerate(shards)
        ]
        _check_names(source, {name for files in done for sizes in files.values() for name in sizes})
        _name_files(unfinished, {file: sizes for files in done for file, sizes in files.items()})
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, unfinished / path.name)
        for path in [*unfinished.glob(".part-*"), *unfinished.glob("part-*")]:  # also what a killed run left
            path.unlink()
        unfinished.rename(target)


def _shards(source: Path) -> list[Path]:
    """Return the .bin files of a checkpoint. Raises ModelError."""
    if any(source.glob("*.safetensors")):
        raise ModelError(f"{source}: has safetensors already; there is nothing to convert")
    index = source / INDEX
    if not index.is_file():
        if not (source / SINGLE).is_file():
            raise ModelError(f"{source}: neither {SINGLE} nor {INDEX} in it; only these are converted")
        return [source / SINGLE]
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index}: names the file {name!r}, which is not in this folder")
        if not (source / name).is_file():
            raise ModelError(f"{source}: shard {name} is missing; {INDEX} names it")
    return [source / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(name) for tensor, name in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{index}: not an index of shards: {error!r}") from error


def _check_names(source: Path, found: set[str]) -> None:
    index = source / INDEX
    missing = sorted(_weight_map(index).keys() - found) if index.is_file() else []
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{source}: {INDEX} names {missing[0]}{more}, and no file has it")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep the folder of unfinished files for one process. Raises ModelError."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ModelError(f"{folder}: another `instar convert` works there") from error
    except ModelError:
        shutil.rmtree(folder, ignore_errors=True)  # a run again would not help
        raise
    finally:
        os.close(descriptor)


def _convert_shard(
    path: Path, folder: Path, number: int, group_bytes: int, progress: ProgressLine
) -> dict[str, dict[str, int]]:
    """Return the bytes of each tensor by file, after making the files if an earlier run has not."""
    stat = path.stat()
    identity = [path.name, stat.st_size, stat.st_mtime_ns, group_bytes]
    record = folder / f".part-{number:05}.json"
    if (kept := _read_record(record, identity)) is not None:
        progress.advance(_mib(path))
        return kept
    left_mib = _mib(path)
    files: dict[str, dict[str, int]] = {}
    memory_bytes = 2 * stat.st_size + 3 * group_bytes + _SPARE_BYTES
    limit_s = _LEAST_S + stat.st_size / _BYTES_PER_S
    prefix = folder / f"part-{number:05}"
    command = [sys.executable, "-m", "worker.offline.bin_shard", str(path), str(prefix)]
    with subprocess.Popen(
        [*command, str(group_bytes), str(memory_bytes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            assert process.stdout and process.stderr
            for line in process.stdout:
                made = json.loads(line)
                files[made["file"]] = made["tensors"]
                done_mib = min(left_mib - 1, sum(made["tensors"].values()) >> 20)
                left_mib -= done_mib
                progress.advance(done_mib)
            errors = process.stderr.read().strip()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
    if process.returncode:
        raise ModelError(f"{path}: {_failure(process.returncode, errors, memory_bytes, limit_s)}")
    progress.advance(left_mib)
    whole = record.with_suffix(".tmp")
    whole.write_text(json.dumps({"of": identity, "files": files}), encoding="utf-8")
    whole.replace(record)
    return files


def _mib(path: Path) -> int:
    return 1 + (path.stat().st_size >> 20)


def _read_record(record: Path, identity: list[Any]) -> dict[str, dict[str, int]] | None:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        files: dict[str, dict[str, int]] = found["files"]
    except (OSError, ValueError, KeyError):
        return None
    return files if found["of"] == identity and all((record.parent / f).is_file() for f in files) else None


def _failure(status: int, errors: str, memory_bytes: int, limit_s: float) -> str:
    last = errors.splitlines()[-1] if errors else ""  # torch's warnings come before
    if status == REFUSED:
        return last
    ending = f"signal {-status}" if status < 0 else f"exit status {status}"
    return (
        f"the process that read it ended with {ending}{f': {last}' if last else ''}; it may take"
        f" {memory_bytes >> 20} MiB and {limit_s:.0f} s"
    )


def _name_files(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Give the files the names that Hugging Face's have, and write their index if there are several."""
    if len(files) == 1:
        (folder / next(iter(files))).rename(folder / "model.safetensors")
        return
    names = {file: f"model-{i:05}-of-{len(files):05}.safetensors" for i, file in enumerate(files, 1)}
    total = sum(size for sizes in files.values() for size in sizes.values())
    weight_map = {tensor: names[file] for file, sizes in files.items() for tensor in sizes}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    for file, name in names.items():
        (folder / file).rename(folder / name)
