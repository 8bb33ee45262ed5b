"""Which service a command asks: the one named, else the one of the settings, else the one that runs here."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bus.settings import GatewaySettings, Settings
from instar.cli import main
from instar.errors import InputError
from instar.running import announced, locate, running_services
from instar.serve.redis_server import free_port

DEFAULT = Settings().gateway


def test_the_only_running_service_is_found_without_its_port() -> None:
    assert locate(DEFAULT, None) == ("http://127.0.0.1:8000", True)
    with announced("http://127.0.0.1:9001"):
        assert locate(DEFAULT, None) == ("http://127.0.0.1:9001", True)
        assert locate(GatewaySettings(port=9002), None) == ("http://127.0.0.1:9002", True)
        assert locate(DEFAULT, "http://127.0.0.1:9003") == ("http://127.0.0.1:9003", False)
    assert running_services() == []


def test_of_several_running_services_one_must_be_named() -> None:
    urls = ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    with ExitStack() as stack:
        for url in urls:
            stack.enter_context(announced(url))
        with pytest.raises(InputError, match=r"2 services run here: .*:9001, .*:9002; choose one with --url"):
            locate(DEFAULT, None)
        assert locate(DEFAULT, urls[0])[0] == urls[0]


def test_a_killed_service_is_not_found(_no_running_service: Path) -> None:
    code = (
        "import time\nfrom instar.running import announced\n"
        "with announced('http://127.0.0.1:9001'): print('up', flush=True); time.sleep(60)"
    )
    service = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert service.stdout is not None
    service.stdout.readline()
    assert running_services() == ["http://127.0.0.1:9001"]
    service.kill()
    service.wait()
    service.stdout.close()
    assert running_services() == []


def test_a_folder_that_cannot_be_written_does_not_keep_a_service_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with announced("http://127.0.0.1:9001"):
        assert running_services() == []


def test_serve_can_be_found_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    async def supervise(*_: object) -> int:
        seen.append(running_services())
        return 0

    monkeypatch.setattr("instar.commands.serve._supervise", supervise)
    port = free_port()
    assert main(["serve", "--port", str(port)]) == 0
    assert seen == [[f"http://127.0.0.1:{port}"]] and running_services() == []
