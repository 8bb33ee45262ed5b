"""The command line: what it teaches, what it answers to slips, what it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from bus.settings import Settings
from bus.settings_sources import fields_of
from instar.cli import main
from instar.commands.serve import FLAGS
from instar.commands.settings import example
from instar.serve.redis_server import free_port
from tests.support.paths import ROOT
from tests.support.threaded_http import serving


def test_the_example_file_is_what_the_settings_say() -> None:
    written = (ROOT / "instar.example.toml").read_text()
    assert written == example(), "write it anew: instar settings --example > instar.example.toml"


def test_the_example_file_is_valid_and_changes_nothing(tmp_path: Path) -> None:
    from bus.settings import load_settings

    assert load_settings(ROOT / "instar.example.toml", environ={}) == Settings()


def test_every_flag_is_a_setting() -> None:
    assert {setting for _, setting, *_ in FLAGS} <= fields_of(Settings).keys()


def test_help_comes_at_once() -> None:
    quickest = min(_seconds_of_help() for _ in range(3))
    assert quickest < 0.3


def _seconds_of_help() -> float:
    """Measure seconds of a processor: other tests may run meanwhile."""
    began = os.times()
    done = subprocess.run([sys.executable, "-m", "instar", "--help"], capture_output=True, cwd=ROOT)
    assert done.returncode == 0
    ended = os.times()
    return ended.children_user + ended.children_system - began.children_user - began.children_system


def test_a_bad_flag_is_answered_with_what_it_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert "--port: gateway.port = '70000': it must be 65535 or less" in _err(capsys)


def test_a_bad_variable_ends_every_command_that_reads_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTAR_GATEWAY__PROT", "1")
    for command in ("serve", "status", "settings"):
        assert main([command]) == 2
        assert "did you mean INSTAR_GATEWAY__PORT?" in _err(capsys)


def test_settings_are_listed_with_who_set_them_and_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[gateway]\nport = 8123\napi_keys = ["hush-hush"]\n')
    monkeypatch.setenv("INSTAR_WORKERS", "3")
    assert main(["settings", "--config", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"gateway.port = 8123  [{path}]" in out
    assert "serve.workers = 3  [INSTAR_WORKERS]" in out
    assert 'gateway.api_keys = "(not shown)"' in out
    assert "hush-hush" not in out


def test_status_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "no gateway answers at http://127.0.0.1" in (told := _err(capsys))
    assert "instar serve" in told


def test_status_shows_workers_memory_and_instances(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from instar.commands.status import instances_table, shape_lines, workers_table

    worker: dict[str, Any] = {"id": "w0", "host": "h", "device": "cpu", "epoch": 1, "state": "serving"}
    worker |= {"pages": {"budget": 32, "weights": 16, "kv": 8, "free": 8}, "page_bytes": 1 << 20, "busy": 0.5}
    layers = [{"attention": "full", "ffn": "full"}] * 5 + [{"attention": "full", "ffn": "int4"}] * 3
    instance: dict[str, Any] = {"id": "demo@w0", "model": "demo", "workers": ["w0"], "tp": 1, "pp": 1}
    instance |= {"state": "serving", "running": 2, "waiting": 1, "layers": layers}
    instance |= {"kv": {"blocks": 100, "used": 25, "block_tokens": 16}}
    console = Console(width=200)
    console.print(workers_table([worker]), instances_table([instance]))
    out = capsys.readouterr().out
    for shown in ("50%", " 16  ", " 32", " 5/8 ", "25/100 25%", "demo@w0"):
        assert shown in out
    assert shape_lines([instance]) == ["demo@w0: 5 full, 3 int4 ffn (5-7)"]
    assert shape_lines([instance | {"layers": layers[:5]}, {"id": "new", "layers": None}]) == []
    in_8_bits = instance | {"layers": [], "kv": instance["kv"] | {"precision": "int8"}}
    assert shape_lines([in_8_bits]) == ["demo@w0: KV cache in int8"]
    units, counts = (line for line in out.splitlines() if "of time" in line or "used/all" in line)
    assert (units.count("MiB"), counts.count("reqs")) == (4, 2)


def test_status_says_which_controller_leads_and_at_what_it_failed() -> None:
    from instar.commands.status import controller_lines

    last = {"name": "host-7-a1b2c3", "term": 1764000000000, "leads": True}
    (first,) = controller_lines(last, 0.0)
    assert first == "controller: host-7-a1b2c3 leads, term 1764000000000"
    (line,) = controller_lines(last | {"leads": False}, 0.0)
    assert line.startswith("controller: none leads") and "the last was host-7-a1b2c3" in line
    (line,) = controller_lines({"name": "", "term": 0, "leads": False}, 0.0)
    assert line == "controller: none leads, so nothing morphs or deploys"
    assert controller_lines({}, 0.0) == []
    failure = {"work": "morphs", "reason": "TypeError: no number (scaling.py:120 in scale_up)", "at": 1000.0}
    assert controller_lines(last | {"failure": failure}, 1090.0) == [
        first,
        "controller: failed at morphs, 90 s ago: TypeError: no number (scaling.py:120 in scale_up)",
    ]


def test_status_does_not_take_an_absent_number_for_zero(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from instar.commands.status import workers_table

    Console(width=200).print(workers_table([{"id": "w0", "state": "loading", "pages": None, "busy": None}]))
    assert "0%" not in capsys.readouterr().out


def test_a_server_that_is_not_a_gateway_is_named_without_its_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Site(BaseHTTPRequestHandler):
        server_version, sys_version = "Site/1", ""

        def do_GET(self) -> None:
            is_there = self.path == "/admin/state"
            self.send_response(200 if is_there else 404)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"<!DOCTYPE html><html><body>welcome</body></html>")

        def log_message(self, *_: object) -> None:
            pass

    with serving(Site) as url:
        for argv, status in ((["status"], 200), (["deployments"], 404), (["complete", "text"], 404)):
            assert main([*argv, "--url", url]) == 1
            told = _err(capsys)
            assert f"did not answer as an Instar gateway does: {status}, text/html from Site/1" in told
            assert "give the URL that `instar serve` prints with --url" in told
            assert "<" not in told and len(told.splitlines()) == 1


def test_a_missing_package_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one == "instar.client" or one.startswith("instar.commands.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx", None)  # as where it is not installed
    for command, extra in (("serve", "serve"), ("status", "services")):
        assert main([command]) == 2
        told = capsys.readouterr().err
        assert told == f"instar {command}: httpx is not installed here: pip install 'instar[{extra}]'\n"


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("instar ")


def _err(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_json_status_is_what_the_gateway_said(capsys: pytest.CaptureFixture[str]) -> None:
    state = {"workers": [], "instances": [], "more": 1}

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers["Authorization"] == "Bearer k" and self.path == "/admin/state"
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(state).encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(Gateway) as url:
        assert main(["status", "--json", "--url", url, "--api-key", "k"]) == 0
        assert json.loads(capsys.readouterr().out) == state
        assert main(["status", "--url", url]) == 1
        assert "401" in (told := _err(capsys))
        assert "gateway.admin_keys with --api-key KEY or INSTAR_GATEWAY__ADMIN_KEYS=KEY" in told
        assert main(["complete", "text", "--url", url]) == 1
        assert "gateway.api_keys with --api-key KEY or INSTAR_GATEWAY__API_KEYS=KEY" in _err(capsys)
        for same in (f"{url}/", f"{url}/v1", f"{url}/v1/"):  # /v1 as the ready line prints it
            assert main(["status", "--json", "--url", same, "--api-key", "k"]) == 0
