"""Settings: which layer wins, and what a slip is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bus.settings import Settings, SettingsError, WorkerSettings, load_settings, settings_environment
from bus.settings_sources import Given


def complaint(path: Path | None = None, **environ: str) -> str:
    return complaint_of(environ, path)


def complaint_of(environ: dict[str, str], path: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(path, environ={"INSTAR_CONFIG": "", **environ})
    return str(caught.value)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "instar.toml"
    path.write_text(text)
    return path


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "[gateway]\nport = 1\nhost = '::1'\n[serve]\nworkers = 3\n")
    environ = {"INSTAR_GATEWAY__PORT": "2", "INSTAR_HOST": "127.0.0.2"}
    settings = load_settings(path, environ=environ, flags={"gateway.port": Given(3, "--port")})
    assert (settings.gateway.port, settings.gateway.host, settings.serve.workers) == (3, "127.0.0.2", 3)
    assert settings.worker.block_tokens == Settings().worker.block_tokens


def test_short_names_set_what_people_type_and_long_names_win_over_them() -> None:
    settings = load_settings(
        environ={
            "INSTAR_CONFIG": "",
            "INSTAR_PORT": "1",
            "INSTAR_GATEWAY__PORT": "2",
            "INSTAR_REDIS_URL": "redis://elsewhere:1",
            "INSTAR_WORKERS": "2",
            "INSTAR_MODEL": "a=one,two",
        }
    )
    assert settings.gateway.port == 2
    assert settings.redis.url == "redis://elsewhere:1"
    assert (settings.serve.workers, settings.worker.models) == (2, ["a=one", "two"])


def test_what_kubernetes_puts_into_a_container_for_a_service_named_instar_is_not_ours() -> None:
    environ = {
        "INSTAR_PORT": "tcp://10.0.0.1:8000",
        "INSTAR_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "INSTAR_PORT_8000_TCP_ADDR": "10.0.0.1",
        "INSTAR_PORT_8000_TCP_PORT": "8000",
        "INSTAR_SERVICE_HOST": "10.0.0.1",
        "INSTAR_SERVICE_PORT": "8000",
        "INSTAR_SERVICE_PORT_HTTP": "8000",
        "INSTAR_GATEWAY_PORT": "tcp://10.0.0.2:80",
        "INSTAR_REDIS_SERVICE_HOST": "10.0.0.3",
    }
    assert load_settings(environ={"INSTAR_CONFIG": "", **environ}) == Settings()


def test_a_variable_of_somebody_else_is_left_alone() -> None:
    assert load_settings(environ={"INSTAR_CONFIG": "", "INSTAR_LICENCE_SERVER": "x"}) == Settings()


def test_an_unknown_key_of_the_file_names_file_key_value_and_the_likely_one(tmp_path: Path) -> None:
    path = written(tmp_path, "[gateway]\nprot = 8001\n")
    message = complaint(path)
    assert message == f"{path}: gateway.prot = 8001: there is no such setting; did you mean gateway.port?"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("port = 8000", "did you mean gateway.port?"),
        ("[gatway]\nport = 8000", "did you mean gateway.port?"),
        ("gateway = 5", "gateway = 5: there is no such setting"),
        ("[gateway]\nport = 70000", "gateway.port = 70000: it must be 65535 or less"),
        (
            "[log]\nlevel = 'loud'",
            "log.level = 'loud': it must be 'debug', 'info', 'warning' or 'error'",
        ),
        ("[gateway\n", "not valid TOML"),
    ],
)
def test_a_bad_file_is_answered_with_the_place_and_the_way_out(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    message = complaint(path)
    assert message.startswith(f"{path}: ")
    assert told in message


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("INSTAR_GATEWAY__PROT", "1", "did you mean INSTAR_GATEWAY__PORT?"),
        ("INSTAR_GATEWAY_PORT", "1", "did you mean INSTAR_GATEWAY__PORT?"),
        ("INSTAR_WORKER", "1", "did you mean INSTAR_WORKERS?"),
        ("INSTAR_NOWHERE__AT_ALL", "1", "there is no such setting"),
        ("INSTAR_PORT", "http", "gateway.port = 'http': it must be a whole number"),
        ("INSTAR_MODEL", '["a"', "begins like a JSON list but is not one"),
        ("INSTAR_WORKER__LEASE_S", "inf", "worker.lease_s = 'inf': it must be a finite number"),
        ("INSTAR_WORKERS", "0", "serve.workers = '0': it must be 1 or more"),
        ("INSTAR_WORKERS", "1.5", "serve.workers = '1.5': it must be a whole number"),
        ("INSTAR_GATEWAY__REPLAY", "often", "gateway.replay = 'often': it must be true or false"),
    ],
)
def test_a_bad_variable_is_answered_with_its_name_and_the_way_out(
    variable: str, value: str, told: str
) -> None:
    message = complaint_of({variable: value})
    assert message.startswith(f"{variable}: ")
    assert told in message


def test_every_problem_is_told_at_once() -> None:
    message = complaint(INSTAR_PORT="-1", INSTAR_WORKERS="0")
    assert "gateway.port" in message
    assert "serve.workers" in message


def test_a_rule_between_two_keys_names_both() -> None:
    message = complaint(INSTAR_REDIS__SOCKET_TIMEOUT_S="1")
    assert "block_ms = 2000 must stay below socket_timeout_s = 1.0" in message


def test_a_kv_cache_in_8_bits_needs_blocks_of_whole_words() -> None:
    environ = {"INSTAR_WORKER__KV_DTYPE": "int8"}
    assert load_settings(environ={"INSTAR_CONFIG": "", **environ}).worker.kv_dtype == "int8"
    message = complaint_of(environ | {"INSTAR_WORKER__BLOCK_TOKENS": "5"})
    assert "kv_dtype 'int8' needs an even block_tokens, not 5; use 16" in message
    assert "'full' or 'int8'" in complaint(INSTAR_WORKER__KV_DTYPE="int4")


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert str(missing) in complaint(missing)
    with pytest.raises(SettingsError, match="INSTAR_CONFIG"):
        load_settings(environ={"INSTAR_CONFIG": str(missing)})


def test_secrets_show_in_no_message_and_no_repr() -> None:
    environ = {
        "INSTAR_CONFIG": "",
        "INSTAR_REDIS_URL": "redis://:hush@h:1",
        "INSTAR_GATEWAY__API_KEYS": "hush-hush",
    }
    assert "hush" not in repr(load_settings(environ=environ))
    assert "hush" not in complaint(INSTAR_GATEWAY__API_KEYS='["hush"')


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('[""]', "key 1 of 1 has 0 characters"),
        ('["long-enough", "short"]', "key 2 of 2 has 5 characters"),
        ('["two words"]', "without blanks"),
        ('["schlüssel-bund"]', "printable ASCII"),
        ('["line-\\nbreak"]', "printable ASCII"),
    ],
)
def test_a_blank_or_short_key_is_refused(given: str, told: str) -> None:
    for name in ("API_KEYS", "ADMIN_KEYS"):
        text = complaint(None, **{f"INSTAR_GATEWAY__{name}": given})
        assert told in text and f"gateway.{name.lower()}" in text and "short" not in text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("https://chat.example/", "'https://chat.example/' is no origin"),
        ("chat.example", "is no origin"),
        ("ftp://chat.example", "is no origin"),
        ("*", "set a key, or name the origins"),
    ],
)
def test_origins_are_checked(given: str, told: str) -> None:
    assert told in complaint(None, INSTAR_GATEWAY__CORS_ORIGINS=given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"URL": "redis://instar", "SENTINELS": "a"}, "'a' is not host:port"),
        ({"URL": "redis://instar", "SENTINELS": "a:1, b:x"}, "'b:x' is not host:port"),
        ({"URL": "redis://:hush@instar:6379/0", "SENTINELS": "a:1"}, "without a port"),
        ({"URL": "unix:///socket", "SENTINELS": "a:1"}, "NAME is what the Sentinels call the primary"),
        ({"SENTINELS": "a:1"}, "NAME is what the Sentinels call the primary"),
        ({"SENTINEL_PASSWORD_FILE": "file"}, "sentinels is empty"),
    ],
)
def test_sentinels_have_addresses_and_watch_a_primary_by_its_name(given: dict[str, str], told: str) -> None:
    text = complaint(None, **{f"INSTAR_REDIS__{key}": value for key, value in given.items()})
    assert told in text and "hush" not in text


@pytest.mark.parametrize("given", ["hermes", "=hermes", "a=xml"])
def test_formats_of_tools_are_checked(given: str) -> None:
    told = complaint(None, INSTAR_GATEWAY__TOOL_FORMATS=given)
    assert f"{given!r} is no `model=format`" in told and "hermes, mistral, llama3, none" in told
    kept = load_settings(
        environ={"INSTAR_CONFIG": "", "INSTAR_GATEWAY__TOOL_FORMATS": "org/a=b=none, c=llama3"}
    )
    assert kept.gateway.tool_formats == ["org/a=b=none", "c=llama3"]


def test_an_unset_variable_sets_no_key() -> None:
    for given in ("", ",", "[]"):
        environ = {"INSTAR_CONFIG": "", "INSTAR_GATEWAY__API_KEYS": given}
        assert load_settings(environ=environ).gateway.api_keys == []


def test_a_child_finds_the_same_settings_in_its_environment(tmp_path: Path) -> None:
    keys = '["with,a,comma", "and-without"]'
    path = written(tmp_path, f'[gateway]\napi_keys = {keys}\nreplay = false\n[worker]\nid = "w0"\n')
    settings = load_settings(path, environ={"INSTAR_PORT": "0"})
    environ = settings_environment(settings, {"PATH": "/bin", "INSTAR_PORT": "0", "INSTAR_CONFIG": str(path)})
    assert environ["PATH"] == "/bin"
    assert load_settings(environ=environ) == settings


@pytest.mark.parametrize(
    ("host", "published", "loopback_only"),
    [
        ("127.0.0.1", "", True),
        ("localhost", "", True),
        ("::1", "", True),
        ("0.0.0.0", "", False),
        ("", "", False),
        ("10.0.0.1", "", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "192.168.0.1", False),
    ],
)
def test_the_gateway_knows_whether_others_can_reach_it(
    host: str, published: str, loopback_only: bool
) -> None:
    gateway = Settings().gateway.model_copy(update={"host": host, "published_host": published})
    assert gateway.loopback_only is loopback_only


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("INSTAR_API_KEYS", "INSTAR_GATEWAY__API_KEYS"),
        ("INSTAR_API_KEY", "INSTAR_GATEWAY__API_KEYS"),
        ("INSTAR_DEVICE", "INSTAR_WORKER__DEVICE"),
    ],
)
def test_a_variable_that_leaves_its_section_out_is_not_ignored(variable: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable}: there is no such setting; did you mean {meant}"):
        load_settings(environ={"INSTAR_CONFIG": "", variable: "x"})


def test_zeros_are_replaced_by_the_defaults_of_the_device_and_what_is_set_stays() -> None:
    def in_force(device: str, **given: Any) -> tuple[int, int, int]:
        found = WorkerSettings(**given).in_force(device)
        return found.max_num_seqs, found.max_num_batched_tokens, found.max_tp

    assert in_force("cpu") == (64, 512, 4)
    assert in_force("cuda") == (256, 8192, 4)
    assert in_force("cuda", group_host="") == (256, 8192, 1), "no other worker reaches it"
    assert in_force("cuda", group_host="", max_num_seqs=3, max_num_batched_tokens=70, max_tp=2) == (3, 70, 2)
