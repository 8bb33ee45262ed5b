"""The file of API keys: digests only, whole at every moment, and refused with a reason if it is not one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bus.api_keys import ApiKey, KeysFileError, change_keys, digest_of, new_key, read_keys


def test_a_key_comes_back_from_its_file_without_the_key_itself(tmp_path: Path) -> None:
    path = tmp_path / "more" / "keys.json"
    text, key = new_key("alice", scopes=("inference", "admin-read"), weight=2.0, tpm=1000)
    change_keys(path, lambda keys: [*keys, key])
    assert read_keys(path) == [key] and key.digest == digest_of(text.encode())
    assert text.removeprefix("sk-instar-") not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600, "its owner's alone"
    path.chmod(0o640)
    change_keys(path, lambda keys: keys)
    assert path.stat().st_mode & 0o777 == 0o640, "as the operator has set it since"
    assert new_key("alice")[0] != text


def test_changes_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def add(thread: int) -> None:
        for number in range(10):
            change_keys(path, lambda keys, name=f"{thread} {number}": [*keys, new_key(name)[1]])  # type: ignore[misc]

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        if path.exists():
            read_keys(path)  # never a part of it
    assert len({key.name for key in read_keys(path)}) == 40
    assert sorted(one.name for one in tmp_path.iterdir()) == [".keys.json.lock", "keys.json"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a file of keys"),
        ("{}", "missing required field `keys`"),
        ('{"keys": [{"id": "x", "heft": 1}]}', "heft"),
        ('{"keys": [{"id": "x", "weight": 0}]}', "> 0"),
        ('{"keys": [{"id": "x", "rpm": -1}]}', ">= 0"),
        ('{"keys": [{"id": "x", "scopes": ["all"]}]}', "all"),
        ('{"keys": [{"id": "x", "digest": ""}]}', "no digest"),
        ('{"keys": [ONE, ONE]}', "a key twice"),
    ],
)
def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys.json"
    one = '{"id": "' + "a" * 16 + '", "digest": "' + "a" * 64 + '"}'
    path.write_text(text.replace("ONE", one))
    with pytest.raises(KeysFileError, match=why) as refusal:
        read_keys(path)
    assert str(path) in str(refusal.value)


def test_what_cannot_be_read_made_or_written_says_why(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="instar keys add"):
        read_keys(tmp_path / "none.json")
    with pytest.raises(KeysFileError, match="cannot be made"):
        new_key("x", weight=0.0)
    with pytest.raises(KeysFileError, match="cannot be written"):
        change_keys(Path("/proc/keys.json"), lambda keys: keys)


def test_who_may_write_to_admin_may_read_there() -> None:
    key = ApiKey(id="x", scopes=("admin-write",))
    assert key.may("admin-read") and key.may("admin-write") and not key.may("inference")
