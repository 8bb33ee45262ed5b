"""`instar pull` against a hub on loopback, and the names by which what came is found."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from bus.checkpoints import parse_model
from bus.pulled import RECORD, find_pulled, is_unfinished, models_folder, read_record, split_name
from bus.settings import Settings
from instar.cli import main
from instar.errors import CommandError, InputError, ServerError
from instar.output.progress import StatusLine
from instar.pull import download
from instar.pull.download import PARTS, progress_text, pull, size_text
from instar.pull.files import BadRepository, RemoteFile, weights
from instar.pull.hub import Hub
from instar.serve.models import NamedModel, find_model
from instar.serve.preflight import settings_problem
from instar.serve.programs import with_values
from instar.serve.redis_server import free_port
from tests.support.cli_gateway import be_watched
from tests.support.hub import COMMIT, NEWER, LoopbackHub, checkpoint, loopback_hub
from tests.support.paths import ROOT

REPO = "org/tiny"
KEPT = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE",
    "model.safetensors",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with loopback_hub() as running:
        yield running


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    return 500


def fetch(hub: LoopbackHub, revision: str = "main", line: StatusLine | None = None) -> Path:
    return pull(Hub(hub.url), hub.repo, revision, line or StatusLine())


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_comes_with_its_record_and_nothing_else(hub: LoopbackHub) -> None:
    folder = fetch(hub)
    assert folder == models_folder() / REPO / COMMIT
    assert files_of(folder) == KEPT | {RECORD}
    for name in KEPT:
        assert (folder / name).read_bytes() == hub.files[COMMIT][name]
    record = read_record(folder)
    assert record is not None
    assert (record.repo, record.commit, record.endpoint) == (REPO, COMMIT, hub.url)
    assert record.revisions == ["main"] and record.files.keys() == KEPT
    assert record.files["model.safetensors"].startswith("sha256:")


def test_shards_are_those_that_the_index_names(hub: LoopbackHub) -> None:
    hub.files[COMMIT] = checkpoint(num_shards=3)
    names = files_of(fetch(hub))
    assert {name for name in names if name.endswith(".safetensors")} == {
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    }
    assert "model.safetensors.index.json" in names and "pytorch_model.bin" not in names


def test_what_was_pulled_is_found_by_its_name(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_model(REPO) == ("tiny", Path(REPO).resolve())  # a folder that is not there
    folder = fetch(hub)
    assert parse_model(REPO) == ("tiny", folder)
    assert parse_model(f"other={REPO}") == ("other", folder)
    assert parse_model(f"{REPO}@main") == parse_model(f"{REPO}@{COMMIT[:7]}") == ("tiny", folder)
    assert find_pulled(f"{REPO}@v2") is None and find_pulled("org/other") is None
    settings = with_values(Settings(), "worker", models=[REPO])
    assert settings_problem(settings) == ""
    monkeypatch.chdir(models_folder().parent)
    own = Path(REPO)
    own.mkdir(parents=True)
    assert parse_model(REPO) == ("tiny", own.resolve())


@pytest.mark.parametrize("record", ["", "{}", "[]", '{"files": []}', "\x00"])
def test_a_folder_whose_record_cannot_be_read_is_not_whole(hub: LoopbackHub, record: str) -> None:
    folder = fetch(hub)
    (folder / RECORD).write_text(record)
    assert find_pulled(REPO) is None and is_unfinished(REPO)
    assert fetch(hub) == find_pulled(REPO)


@pytest.mark.parametrize("name", ["../x", "/etc", "a/../b", "a/b/c", "", ".", "~", "x" * 300, "a/b@../c d"])
def test_other_texts_are_no_names(name: str) -> None:
    assert split_name(name) == ("", "") and find_pulled(name) is None


def test_a_name_means_the_commit_that_was_pulled_last(hub: LoopbackHub) -> None:
    older = fetch(hub)
    hub.files[NEWER] = checkpoint(shard_bytes=700)
    hub.revisions |= {"main": NEWER, "v1": COMMIT}
    newer = fetch(hub)
    assert find_pulled(REPO) == newer == find_pulled(f"{REPO}@main")
    assert fetch(hub, "v1") == older == find_pulled(REPO)
    record = read_record(older)
    assert record is not None and record.revisions == ["main", "v1"]
    assert fetch(hub, COMMIT) == older and "main" not in COMMIT
    assert len(hub.ranges("model.safetensors")) == 2  # nothing came twice


def test_an_interrupted_pull_goes_on_at_the_byte_where_it_stopped(
    hub: LoopbackHub, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(StatusLine):
        def show(self, text: str) -> None:
            if "model.safetensors: 1" in text:
                raise KeyboardInterrupt

    monkeypatch.setattr(download, "SHOW_EVERY_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        fetch(hub, line=Interrupted())
    part = models_folder() / REPO / COMMIT / PARTS / "model.safetensors.part"
    have = part.stat().st_size
    assert 0 < have < 5000
    assert find_pulled(REPO) is None and is_unfinished(REPO)
    told = settings_problem(with_values(Settings(), "worker", models=[REPO]))
    assert told == f"model '{REPO}': its download has not ended; `instar pull {REPO}` goes on"
    asked = len(hub.asked)
    folder = fetch(hub)
    assert [range_ for _, range_ in hub.asked[asked + 1 :]] == [f"bytes={have}-"]
    assert (folder / "model.safetensors").read_bytes() == hub.files[COMMIT]["model.safetensors"]
    assert files_of(folder) == KEPT | {RECORD} and not is_unfinished(REPO)


def test_a_part_is_dropped_where_the_hub_knows_no_ranges(hub: LoopbackHub) -> None:
    part = models_folder() / REPO / COMMIT / PARTS / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 100)
    hub.has_ranges = False
    folder = fetch(hub)
    assert (folder / "model.safetensors").read_bytes() == hub.files[COMMIT]["model.safetensors"]


def test_a_connection_that_breaks_is_tried_again(hub: LoopbackHub, small_chunks: int) -> None:
    hub.breaks_after["model.safetensors"] = 2000
    folder = fetch(hub)
    assert (folder / "model.safetensors").read_bytes() == hub.files[COMMIT]["model.safetensors"]
    assert hub.ranges("model.safetensors") == ["", "bytes=2000-"]


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_file_with_another_digest_is_refused_and_removed(hub: LoopbackHub, name: str) -> None:
    hub.corrupt = {name}
    with pytest.raises(ServerError, match=rf"{name} came with another digest than {hub.url} names"):
        fetch(hub)
    assert find_pulled(REPO) is None
    folder = models_folder() / REPO / COMMIT
    assert not (folder / name).exists() and not (folder / PARTS / f"{name}.part").exists()
    hub.corrupt = set()
    assert find_pulled(REPO) is None and fetch(hub) == find_pulled(REPO)


def test_a_disk_that_is_too_small_is_told_before_the_weights_come(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=3000))
    with pytest.raises(CommandError, match=r"needs 4\.9 KiB more in .*2\.9 KiB are free.*XDG_DATA_HOME"):
        fetch(hub)
    assert hub.ranges("model.safetensors") == []


def test_a_disk_that_becomes_full_keeps_what_came(
    hub: LoopbackHub, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_part = download.open_part

    class FullDisk:
        def __init__(self, part: BinaryIO) -> None:
            self.part = part

        def __getattr__(self, name: str) -> Any:
            return getattr(self.part, name)

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self.part.close()

        def write(self, data: bytes) -> int:
            if self.part.tell() >= 2000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.part.write(data)

    monkeypatch.setattr(download, "open_part", lambda part: cast(BinaryIO, FullDisk(open_part(part))))
    with pytest.raises(CommandError, match=r"the disk of .* is full.* Then what came is kept"):
        fetch(hub)
    monkeypatch.setattr(download, "open_part", open_part)
    fetch(hub)
    assert hub.ranges("model.safetensors") == ["", "bytes=2000-"]


def test_a_folder_that_cannot_be_written_is_named(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file in its place")
    with pytest.raises(InputError, match=r"data.* cannot be written: Not a directory; XDG_DATA_HOME"):
        fetch(hub)


def test_one_pull_at_a_time(hub: LoopbackHub) -> None:
    folder = models_folder() / REPO / COMMIT
    folder.mkdir(parents=True)
    with (folder.parent / f".{COMMIT}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match="another `instar pull` fetches"):
            fetch(hub)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ({"config.json"}, "org/tiny has no config.json"),
        ({"model.safetensors"}, "has no safetensors, but pytorch_model.bin, .*`instar convert DIR TARGET`"),
        (
            {"model.safetensors", "pytorch_model.bin"},
            "has neither model.safetensors nor model",
        ),
    ],
)
def test_a_repository_that_is_no_model_is_refused(hub: LoopbackHub, missing: set[str], told: str) -> None:
    hub.files[COMMIT] = {name: data for name, data in checkpoint().items() if name not in missing}
    with pytest.raises(InputError, match=told):
        fetch(hub)
    assert len(hub.asked) == 1 and not is_unfinished(REPO)


def test_an_unknown_architecture_is_refused_before_its_weights_come(hub: LoopbackHub) -> None:
    hub.files[COMMIT]["config.json"] = json.dumps({"architectures": ["GPT2LMHeadModel"]}).encode()
    with pytest.raises(InputError, match="architecture GPT2LMHeadModel is not supported"):
        fetch(hub)
    assert hub.ranges("model.safetensors") == []


GGUFS = {name: name.encode() for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf", "big-00001-of-00002.gguf")}


def test_a_repository_of_gguf_files_names_them_and_takes_none(hub: LoopbackHub) -> None:
    hub.files[COMMIT] = {"README.md": b"", "LICENSE": b"do as you like", **GGUFS}
    with pytest.raises(
        InputError, match=r"name the one .* `instar pull org/tiny big.*There are: .*tiny-Q8_0\.gguf"
    ):
        fetch(hub)
    assert not is_unfinished(REPO)


def test_a_gguf_file_comes_by_its_name_beside_what_was_pulled(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files[COMMIT] |= GGUFS
    monkeypatch.setattr("instar.commands.pull.Hub", lambda: Hub(hub.url))
    folder = models_folder() / REPO / COMMIT
    assert main(["pull", REPO, "tiny-Q8_0.gguf"]) == 0
    path = folder / "tiny-Q8_0.gguf"
    told = capsys.readouterr()
    assert told.out == f"{path}\n" and f"serve it with `instar serve {path}`" in told.err
    assert files_of(folder) == {"LICENSE", "tiny-Q8_0.gguf", RECORD}
    assert find_model(REPO) == NamedModel("tiny", path) and find_model(str(path)).name == "tiny-Q8_0"
    fetch(hub)
    record = read_record(folder)
    assert record is not None and record.files.keys() == KEPT | {"tiny-Q8_0.gguf"}
    assert find_model(REPO) == NamedModel("tiny", folder)
    for name, why in (
        ("tiny-Q2_K.gguf", "has no GGUF file 'tiny-Q2_K.gguf'; these are there: big-0"),
        ("big-00001-of-00002.gguf", "one of 2 parts of a model, and parts are not read"),
    ):
        assert main(["pull", REPO, name]) == 2
        assert why in capsys.readouterr().err
    assert find_pulled(REPO) == folder and files_of(folder) == KEPT | {"tiny-Q8_0.gguf", RECORD}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["pull", REPO, "tiny-Q8_0.gguf"]) == 0
    assert main(["pull", REPO, "tiny-Q4_0.gguf"]) == 1
    assert "org/tiny tiny-Q4_0.gguf has not been pulled" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../evil.safetensors", "absent.safetensors", "config.json"])
def test_an_index_names_files_of_weights_alone(name: str) -> None:
    files = {one: RemoteFile(one, 1, "0") for one in ("config.json", "../../evil.safetensors")}
    with pytest.raises(BadRepository, match="which is no safetensors file there"):
        weights(REPO, files, json.dumps({"weight_map": {"a": name}}).encode())


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": [1]}', b'{"weight_map": {"a": []}}'])
def test_an_index_that_is_none_is_refused(index: bytes) -> None:
    with pytest.raises(BadRepository, match="cannot be read"):
        weights(REPO, {}, index)


def test_what_the_hub_refuses_is_one_sentence(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match="has no revision 'v9'; name a branch"):
        fetch(hub, "v9")
    with pytest.raises(ServerError, match=f"{hub.url} has no model org/absent, or it is private"):
        pull(Hub(hub.url), "org/absent", "main", StatusLine())
    with pytest.raises(InputError, match="'a--b' cannot be the name of a repository"):
        pull(Hub(hub.url), "a--b", "main", StatusLine())
    hub.token = "hf_secret"
    with pytest.raises(ServerError, match="set HF_TOKEN for a private one"):
        fetch(hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetch(hub).is_dir()
    hub.is_gated = True
    with pytest.raises(ServerError, match=f"asks for consent: accept its terms at {hub.url}/org/tiny"):
        fetch(hub)


def test_the_token_stays_with_the_hub_where_files_are_elsewhere(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    hub.store = hub.url.replace("127.0.0.1", "localhost")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetch(hub) / "model.safetensors").is_file()
    assert hub.sent_to_store == [""] * len(KEPT)


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(ServerError, match=r"no hub answers at http://127.0.0.1:\d+ .*HF_ENDPOINT"):
        pull(Hub(f"http://127.0.0.1:{free_port()}"), REPO, "main", StatusLine())


def test_the_progress_says_what_came_and_what_is_left(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [size_text(size) for size in (0, 1023, 2048, 5 << 20, 3 << 30)] == [
        "0 bytes",
        "1023 bytes",
        "2.0 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert progress_text("a", 1 << 30, 4 << 30, 10 << 20) == "  a: 1.0 GiB of 4.0 GiB, 10.0 MiB/s, 5 min left"
    assert progress_text("a", 0, 1024, 0.0) == "  a: 0 bytes of 1.0 KiB"
    fetch(hub)
    assert "model.safetensors: 4.9 KiB\n" in capsys.readouterr().err
    shutil.rmtree(models_folder())
    be_watched(monkeypatch)
    fetch(hub)
    assert "comparing its digest" in capsys.readouterr().err


def run(hub: LoopbackHub, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process: `huggingface_hub` reads its variables when it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "instar", "pull", *argv],
        env={**os.environ, "HF_ENDPOINT": hub.url, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_offline_mode_without_the_model_is_one_sentence(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["pull", REPO]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(
        "instar pull: HF_HUB_OFFLINE is set, and org/tiny has not been pulled; unset it"
    )
    with pytest.raises(ServerError, match=f"HF_HUB_OFFLINE is set, so {hub.url} is not asked"):
        fetch(hub)
    assert hub.asked == []


def test_the_command_honours_mirror_and_offline_mode(hub: LoopbackHub) -> None:
    done = run(hub, REPO)
    folder = models_folder() / REPO / COMMIT
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert f"org/tiny at commit {COMMIT}; serve it with `instar serve org/tiny`" in done.stderr
    asked = len(hub.asked)
    again = run(hub, REPO, HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout, len(hub.asked)) == (0, f"{folder}\n", asked)


def test_a_text_that_is_no_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "../model"]) == 2
    assert "write it as ORG/NAME or ORG/NAME@REVISION" in capsys.readouterr().err
