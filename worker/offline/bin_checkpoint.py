"""`instar convert`: safetensors of a checkpoint of PyTorch's .bin files, the same tensors bit for bit.

Each file is read by a process of its own (`worker.offline.bin_shard`) with limits of memory, output and time.
Files of an interrupted run that are whole are kept and used by the next one, also if it ended because of the
disk, a signal or the time. Only a refusal, which would come again, removes them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from worker.model.config import ModelError, read_config
from worker.offline.bin_shard import FAILED, REFUSED, shown
from worker.offline.new_folder import GROUP_BYTES, Unfinished, name_files, new_folder
from worker.offline.progress import ProgressLine

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SPARE_BYTES = 1 << 30
_LEAST_S, _BYTES_PER_S = 120.0, 10e6  # far below a disk's speed
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.md", "readme*", "licen[cs]e*", "notice*")
_ERROR_BYTES = 2000  # that are read from the end of a process's errors
_MOST_SHOWN = 500  # characters of its last line


def convert_bin(source: Path, target: Path, group_bytes: int = GROUP_BYTES) -> None:
    """Make safetensors of the checkpoint in `source` in a new folder `target`.

    Raises ModelError: no such checkpoint, a target that exists, a file that holds anything but tensors or
    takes too much memory, tensors that the index names and no file has; Unfinished, OSError.
    """
    read_config(source)  # what could not be served is refused before any work
    shards = _shards(source)
    with new_folder(target) as unfinished:
        progress = ProgressLine("convert", sum(_mib(path) for path in shards), "MiB")
        done = [
            _convert_shard(path, unfinished, number, group_bytes, progress)
            for number, path in enumerate(shards)
        ]
        _check_names(source, {name for files in done for sizes in files.values() for name in sizes})
        made = {file: sizes for files in done for file, sizes in files.items()}
        for path in unfinished.iterdir():  # the records, and what a killed run left
            if path.name not in made:
                path.unlink()
        name_files(unfinished, made)
        for path in source.iterdir():
            if path.is_file() and _is_copied(path.name.lower()):
                shutil.copyfile(path, unfinished / path.name)


def _is_copied(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _COPIED) and not name.endswith(".index.json")


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
            raise ModelError(f"{index}: names the file {shown(name)}, which is not in this folder")
        if not (source / name).is_file():
            raise ModelError(f"{source}: shard {shown(name)} is missing; {INDEX} names it")
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
        raise ModelError(f"{source}: {INDEX} names {shown(missing[0])}{more}, and no file has it")


def _convert_shard(
    path: Path, folder: Path, number: int, group_bytes: int, progress: ProgressLine
) -> dict[str, dict[str, int]]:
    """Return the bytes of each tensor by file, after making the files if an earlier run has not.

    Raises ModelError, and Unfinished if a run again may help.
    """
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
    with (
        tempfile.TemporaryFile() as errors,  # a pipe that nobody reads meanwhile would hold the process up
        subprocess.Popen(
            [*command, str(group_bytes), str(memory_bytes), str(limit_s)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout
            for line in process.stdout:
                made = json.loads(line)
                files[made["file"]] = made["tensors"]
                done_mib = min(left_mib - 1, sum(made["tensors"].values()) >> 20)
                left_mib -= done_mib
                progress.advance(done_mib)
        except BaseException:
            process.kill()
            raise
        if status := process.wait():
            last = _last_line(errors)
            if status == REFUSED:
                raise ModelError(f"{path}: {last}")
            limits = f"it may take {memory_bytes >> 20} MiB and {limit_s:.0f} s"
            raise Unfinished(
                f"{path}: the process that read it ended with {_ending(status)}{f': {last}' if last else ''};"
                f" {limits}. {folder} keeps the files that were done: run the command again to go on"
            )
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


def _last_line(errors: IO[bytes]) -> str:
    """Return the end of what a process wrote; torch's warnings come before."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _ERROR_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:_MOST_SHOWN] if lines else ""


def _ending(status: int) -> str:
    if status == -signal.SIGALRM:
        return "its time"
    if status == FAILED:
        return "an error of the system"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
