"""`instar keys`: the key is printed once, and the file has its digest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bus.api_keys import digest_of, read_keys
from instar.cli import main


def test_a_key_is_added_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    monkeypatch.setenv("INSTAR_GATEWAY__KEYS_FILE", str(path))
    limits = ("--weight", "0.5", "--tpm", "60000", "--rpm", "600", "--concurrent", "8")
    assert main(["keys", "add", "batch", *limits]) == 0
    text = capsys.readouterr().out.splitlines()[0]
    (key,) = read_keys(path)
    assert key.digest == digest_of(text.encode()) and text not in path.read_text()
    assert (key.weight, key.tpm, key.rpm, key.concurrent, key.scopes) == (0.5, 60000, 600, 8, ("inference",))
    assert main(["keys", "add", "grafana", "--scope", "admin-read", "--json"]) == 0
    added = json.loads(capsys.readouterr().out)
    assert added["key"].startswith("sk-instar-") and "digest" not in added
    assert main(["keys", "list"]) == 0
    told = capsys.readouterr().out
    assert "batch" in told and "admin-read" in told and text not in told and key.digest not in told
    assert main(["keys", "revoke", "batch"]) == 0
    assert capsys.readouterr().out == f"revoked 1 key: batch ({key.id})\n"
    assert main(["keys", "revoke", added["id"]]) == 0
    capsys.readouterr()
    assert main(["keys", "list"]) == 0
    assert "no key is in the file" in capsys.readouterr().out


def test_what_cannot_be_done_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--file", str(tmp_path / "keys.json"))
    for words, why in (
        (("list", *file), "instar keys add"),
        (("add", "a" * 65, *file), "1 to 64"),
        (("revoke", "nobody", *file), "there are: none"),
    ):
        assert main(["keys", *words]) == 2
        assert why in capsys.readouterr().err
    assert main(["keys", "add", "one", *file]) == 0
    assert main(["keys", "add", "one", *file]) == 2
    assert "there is a key 'one'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["keys", "add", "two", "--scope", "admin", *file])
    assert "admin-read" in capsys.readouterr().err


def test_without_a_file_the_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list"]) == 2
    assert "INSTAR_GATEWAY__KEYS_FILE" in capsys.readouterr().err
