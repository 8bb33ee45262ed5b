"""Both releases read each other's messages: the program of the release before reads the bytes itself."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bus.codec import MESSAGE_TYPES, encode
from tests.support import wire_samples
from tests.support.paths import ROOT
from tests.support.wire_samples import sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RECORDED = ROOT / "tests" / "bus" / "wire_format_1.json"
NEW = {"ConvertCache", "Envelope", "WeighLevers"}  # orders and limits that release 0.1 does not know


def run_in(folder: Path, work: str, text: str = "") -> dict[str, str]:
    """Return what `wire_samples` prints if the program in `folder` runs it."""
    program = Path(wire_samples.__file__).read_text()
    done = subprocess.run(
        [sys.executable, "-c", program, work],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_release_before_reads_every_message_that_is_written_for_it(release_before: Path) -> None:
    written = {kind.__name__: base64.b64encode(encode(sample(kind), 1)).decode() for kind in MESSAGE_TYPES}
    refused = {name: why for name, why in run_in(release_before, "read", json.dumps(written)).items() if why}
    assert refused == {name: f"unknown message type {name!r}" for name in NEW}


def test_the_release_before_reads_no_message_of_this_one(release_before: Path) -> None:
    written = {kind.__name__: base64.b64encode(encode(sample(kind))).decode() for kind in MESSAGE_TYPES}
    refused = run_in(release_before, "read", json.dumps(written))
    assert set(refused.values()) == {"schema version 2, this program speaks 1"}


def test_the_recorded_messages_are_those_of_the_release_before(release_before: Path) -> None:
    assert run_in(release_before, "record") == json.loads(RECORDED.read_text())
