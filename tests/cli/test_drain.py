"""`instar drain`, against a gateway that answers by a script."""

from __future__ import annotations

import json

import pytest

from tests.support.cli_gateway import Script, be_watched, cluster, instance

pytest_plugins = ["tests.support.cli_fixtures"]


def test_a_drained_worker_is_waited_for(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(202, {"id": "d", "worker": "w1", "epoch": 7, "state": "draining"})]
    workers = [{"id": "w1", "host": "here", "epoch": 7}]
    gateway.state = cluster(instance("w1", running=2)) | {"workers": workers}
    assert gateway.main("drain", "w1", "--wait", "0.3") == 1
    assert "w1 is still draining after 0.3 s; `instar status` shows it" in capsys.readouterr().out
    gateway.state = {"instances": [], "workers": [workers[0] | {"epoch": 8}]}  # another life of it
    assert gateway.main("drain", "w1") == 0
    assert gateway.asked == [("POST", "/admin/workers/w1/drain", None)] * 2
    assert capsys.readouterr().out.startswith("w1 has left after 0.")
    assert gateway.main("drain", "w1", "--detach") == 0
    assert capsys.readouterr().out == "w1 is draining\n"


def test_what_a_drain_waits_for_is_shown_on_a_terminal(
    gateway: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_watched(monkeypatch)
    gateway.answers = [(202, {"id": "d", "worker": "w1", "epoch": 7, "state": "draining"})]
    gateway.state = cluster(instance("w1", running=2)) | {"workers": [{"id": "w1", "epoch": 7}]}
    assert gateway.main("drain", "w1", "--wait", "0.3", "--json") == 1
    told = capsys.readouterr()
    assert told.err == "\r\033[K  w1 finishes 4 requests, 0 s\n"
    assert json.loads(told.out) == {"worker": "w1", "state": "draining", "seconds": None}


def test_a_worker_that_is_not_there_is_no_drain(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(404, {"error": {"message": "no worker 'w9'; did you mean 'w1'?"}})]
    assert gateway.main("drain", "w9") == 1
    assert (
        "instar drain: /admin/workers/w9/drain: 404: no worker 'w9'; did you mean" in capsys.readouterr().err
    )


def test_the_last_worker_is_drained_only_by_force(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [
        (409, {"error": {"message": "w0 is the last worker that serves demo", "code": "last_worker"}}),
        (202, {"id": "d", "worker": "w0", "epoch": 7, "state": "draining"}),
    ]
    assert gateway.main("drain", "w0") == 1
    assert "409: w0 is the last worker that serves demo" in capsys.readouterr().err
    assert gateway.main("drain", "w0", "--force", "--detach") == 0
    assert gateway.asked[-1] == ("POST", "/admin/workers/w0/drain?force=true", None)
