"""The training text: the .py files of this Python's standard library, split by file into train and held-out.

Every machine with Python has this text, so training needs no download. A file's side of the split depends on
its relative path alone: a file that exists in two Python versions is on the same side in both.
"""

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 56  # about 1.8 % of the files, which is 400 to 700 KB of text
NEAR_DUPLICATE_SHARE = 0.7  # of a file's distinct lines found in one file before it
MIN_LINE_CHARS = 8  # shorter lines ("try:", "pass") are everywhere and say nothing about copying
MIN_DISTINCT_LINES = 5
SKIPPED_PARTS = frozenset({"site-packages", "__pycache__"})
# Written when Python was built: it holds that machine's paths and flags, which no model should learn.
SKIPPED_PREFIXES = ("_sysconfigdata",)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One whole file: `path` is relative to the standard library, `text` is unchanged."""

    path: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8, the unit of every bits-per-byte figure."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two disjoint sets of whole files, each in path order."""

    train: list[SourceFile]
    held_out: list[SourceFile]

    @property
    def train_bytes(self) -> int:
        """UTF-8 bytes to train on."""
        return sum(f.num_bytes for f in self.train)

    @property
    def held_out_bytes(self) -> int:
        """UTF-8 bytes that nothing was trained on."""
        return sum(f.num_bytes for f in self.held_out)


def stdlib_root() -> Path:
    """Return the folder that holds this Python's own .py files."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(path: str) -> bool:
    """Return True if a relative POSIX path is on the held-out side; nothing else counts."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read, drop near-duplicates over both sides together, split. Same files in, same corpus out."""
    files = list(without_near_duplicates(read_sources(root or stdlib_root())))
    return Corpus(
        train=[f for f in files if not is_held_out(f.path)],
        held_out=[f for f in files if is_held_out(f.path)],
    )


def read_sources(root: Path) -> Iterator[SourceFile]:
    """Every readable, non-empty UTF-8 .py file under `root`, in path order."""
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if SKIPPED_PARTS.intersection(name.parts) or name.name.startswith(SKIPPED_PREFIXES):
            continue
        text = _decoded(path)
        if text:
            yield SourceFile(name.as_posix(), text)


def without_near_duplicates(files: Iterator[SourceFile]) -> Iterator[SourceFile]:
    """Drop a file most of whose lines stand in one file before it.

    Without this the code pages of `encodings/` and copied test helpers would put near copies of training
    files on the held-out side, and the score would measure memory.
    """
    files_of_line: dict[str, list[int]] = {}
    for index, file in enumerate(files):
        lines = _distinct_lines(file.text)
        shared = Counter(owner for line in lines for owner in files_of_line.get(line, ()))
        most = max(shared.values(), default=0)
        if len(lines) < MIN_DISTINCT_LINES or most < NEAR_DUPLICATE_SHARE * len(lines):
            yield file
            for line in lines:
                owners = files_of_line.setdefault(line, [])
                if len(owners) < 32:  # a line in 32 files is boilerplate; the bound keeps this linear
                    owners.append(index)


def _distinct_lines(text: str) -> set[str]:
    stripped = (line.strip() for line in text.splitlines())
    return {line for line in stripped if len(line) >= MIN_LINE_CHARS}


def _decoded(path: Path) -> str:
    """Return the file's text, or an empty string where it is not UTF-8 (the library tests odd encodings)."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""
