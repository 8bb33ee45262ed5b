"""The client of all commands that ask a gateway: where keys go, and the answer to a wrong address."""

from __future__ import annotations

import httpx
import pytest

from bus.settings import GatewaySettings, Settings
from instar.client import check_answer, gateway_client
from instar.errors import InputError, ServerError

KEYS = ["hush-hush"]


@pytest.mark.parametrize(
    ("host", "url", "is_sent"),
    [
        ("127.0.0.1", None, True),
        ("127.0.0.1", "http://127.0.0.1:8123", True),
        ("127.0.0.1", "http://localhost:8123/v1", True),
        ("0.0.0.0", "http://[::1]:8123", True),
        ("gpu-box", "http://gpu-box:8123", True),
        ("127.0.0.1", "http://127.0.0.1:8124", False),
        ("127.0.0.1", "http://example.org:8123", False),
        ("127.0.0.1", "https://localhost", False),
    ],
)
def test_keys_of_the_settings_go_to_their_own_service_only(host: str, url: str | None, is_sent: bool) -> None:
    settings = Settings(gateway=GatewaySettings(host=host, port=8123, api_keys=KEYS, admin_keys=KEYS))
    with gateway_client(settings, url, None, "admin_keys") as client:
        assert (client.headers.get("authorization") == "Bearer hush-hush") == is_sent
    with gateway_client(settings, url, "given", "admin_keys") as client:
        assert client.headers["authorization"] == "Bearer given"


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:8000", "http://[::1", "http://h:port", "http://", "http://a..b", ""]
)
def test_what_is_not_a_url_is_refused(url: str) -> None:
    with (
        pytest.raises(InputError, match=r"--url .*; write it as http://127.0.0.1:8000"),
        gateway_client(Settings(), url, None, "api_keys"),
    ):
        pass


def test_a_path_that_is_not_there_leads_back_to_the_address() -> None:
    def answer(path: str) -> httpx.Response:
        message = {"error": {"message": "there is nothing"}}
        return httpx.Response(404, json=message, request=httpx.Request("GET", f"http://h:1{path}"))

    with pytest.raises(ServerError, match=r"nothing; is --url right\? .* as http://h:1/$"):
        check_answer(answer("/nope/admin/state"))
    with pytest.raises(ServerError, match=r"there is nothing$"):
        check_answer(answer("/admin/morphs/x"))
