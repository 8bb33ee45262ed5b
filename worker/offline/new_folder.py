"""The folder that `instar convert` makes: whole, or not there.

It is made beside the target under another name, which one process has at a time, and renamed at the end.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from worker.model.config import ModelError

GROUP_BYTES: Final = 2 << 30  # of a file that is written; while it is written, it is in memory twice


class Unfinished(ModelError):
    """The disk, the machine or the time ended the work: what was made is kept."""


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield the folder to fill; it becomes `target` when the block ends, and is removed on a ModelError.

    After an interruption it keeps what was made, as after Unfinished. Raises ModelError: a target that
    exists, or another process that makes it.
    """
    if target.exists():
        raise ModelError(f"{target}: exists already; name a new folder")
    folder = target.with_name(f".{target.name}.converting")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
        folder.rename(target)
    except BlockingIOError as error:
        raise ModelError(f"{folder}: another `instar convert` works there") from error
    except Unfinished:
        raise
    except ModelError:
        shutil.rmtree(folder, ignore_errors=True)  # a run again would not help
        raise
    finally:
        os.close(descriptor)


def name_files(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Give files the names that Hugging Face's have, and write their index if there are several.

    files: the bytes of each tensor, by file.
    """
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
