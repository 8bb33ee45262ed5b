"""The checkpoints that `instar pull` fetched: where they lie, and which of them a name means.

    $XDG_DATA_HOME/instar/models/ORG/NAME/COMMIT/     a model folder

A folder is whole when it has its record, which is written last.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

RECORD: Final = "pull.json"
DEFAULT_REVISION: Final = "main"
_NAME: Final = re.compile(r"([A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?)(?:@([\w./-]{1,200}))?")
_SHORTEST_COMMIT: Final = 7  # digits by which a commit may be named


@dataclass(frozen=True, slots=True)
class PulledCheckpoint:
    """The record of a folder: which commit of which repository it holds."""

    repo: str
    commit: str  # 40 hex digits
    endpoint: str  # URL of the hub
    revisions: list[str]  # branches and tags that were resolved to this commit
    pulled_at: float  # Unix time
    files: dict[str, str]  # name -> digest, as `sha256:...` or `git:...`

    def is_at(self, revision: str) -> bool:
        """Return whether `revision` means this commit: a branch, a tag, or the commit's first digits."""
        is_short = len(revision) >= _SHORTEST_COMMIT and self.commit.startswith(revision.lower())
        return revision in self.revisions or is_short


def models_folder() -> Path:
    """Return the folder of all pulled checkpoints."""
    data = os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()
    return Path(data) / "instar" / "models"


def split_name(name: str) -> tuple[str, str]:
    """Return repository and revision of `ORG/NAME@REVISION`, ("", "") if it is no such name."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2] or "") if found else ("", "")


def served_name(name: str) -> str:
    """Return the name under which `ORG/NAME@REVISION` is served."""
    return split_name(name)[0].rpartition("/")[2]


def read_record(folder: Path) -> PulledCheckpoint | None:
    """Return the record of a folder, None if the folder is not whole."""
    try:
        found = json.loads((folder / RECORD).read_bytes())
        return PulledCheckpoint(
            repo=str(found["repo"]),
            commit=str(found["commit"]),
            endpoint=str(found["endpoint"]),
            revisions=list(map(str, found["revisions"])),
            pulled_at=float(found["pulled_at"]),
            files={str(name): str(digest) for name, digest in found["files"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def record_text(record: PulledCheckpoint) -> str:
    """Return the content of RECORD."""
    return json.dumps(asdict(record), indent=2) + "\n"


def find_pulled(name: str) -> Path | None:
    """Return the folder that `ORG/NAME` or `ORG/NAME@REVISION` means: of several the last that was pulled."""
    repo, revision = split_name(name)
    found = [
        (record.pulled_at, folder)
        for folder in _commits(repo)
        if (record := read_record(folder)) is not None and (not revision or record.is_at(revision))
    ]
    return max(found)[1] if found else None


def is_unfinished(name: str) -> bool:
    """Return whether a pull of `name` was begun, and nothing of it is whole."""
    repo, _ = split_name(name)
    return bool(_commits(repo)) and find_pulled(repo) is None


def _commits(repo: str) -> list[Path]:
    """Return the folders of a repository's commits, whole or not."""
    try:
        folders = [path for path in (models_folder() / repo).iterdir() if path.is_dir()] if repo else []
    except OSError:
        return []
    return sorted(path for path in folders if re.fullmatch(r"[0-9a-f]{40}", path.name))
