"""The release before this one, whose processes serve beside those of this one."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

RELEASE_BEFORE = "7d264d55e587df80bac5ba848764e33ead9fd096"  # release 0.1, which writes schema 1


@pytest.fixture(scope="session")
def release_before(pytestconfig: pytest.Config) -> Path:
    """The folder of its program; stays in pytest's cache with the kernels that its workers compile there.

    Skips the test where the history of the clone does not reach so far.
    """
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("release-before")
    folder = cache / RELEASE_BEFORE
    if not folder.exists():
        packed = subprocess.run(["git", "archive", RELEASE_BEFORE], cwd=ROOT, capture_output=True)
        if packed.returncode:
            pytest.skip(f"no commit {RELEASE_BEFORE[:8]} here: git fetch --unshallow")
        half_done = Path(tempfile.mkdtemp(dir=cache))
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(half_done, filter="data")
        half_done.rename(folder)
    return folder
