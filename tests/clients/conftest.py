"""The address of a real service, one for all clients; they reach nothing but this machine."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
# Collected only where the clients are installed.
collect_ignore_glob: Final = [] if find_spec("litellm") else ["test_*.py"]
# What clients would fetch or report when they are imported.
OFFLINE: Final = {
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


def _refuse_other_hosts(event: str, args: tuple[Any, ...]) -> None:
    """Raise PermissionError for a connection to another machine, or a question for its address."""
    if event not in ("socket.connect", "socket.getaddrinfo"):
        return
    host = args[0] if event == "socket.getaddrinfo" else args[1][0] if isinstance(args[1], tuple) else None
    name = host.decode() if isinstance(host, bytes) else host
    if name not in (None, "", "localhost") and not _is_here(str(name)):
        raise PermissionError(f"a client of these tests asks for {name!r}; they may reach this machine alone")


def _is_here(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


if not collect_ignore_glob:
    os.environ.update(OFFLINE)
    sys.addaudithook(_refuse_other_hosts)


@pytest.fixture(scope="session")
def service_url() -> Iterator[str]:
    """The address of the service, which ends with the session."""
    python = os.environ.get("SERVICE_PYTHON", ".venv/bin/python")
    args = [python, "-m", "tests.clients.service"]
    with subprocess.Popen(
        args, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the service did not start; its last words are above"
        yield address


@pytest.fixture
def base_url(service_url: str) -> str:
    """The address that clients of OpenAI's API take."""
    return f"{service_url}/v1"
