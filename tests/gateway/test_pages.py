"""The dashboard's files over HTTP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bus.settings import RedisSettings
from gateway.operations.public import FOLDER, TYPES
from tests.support.gateway_harness import Gate, running

pytest_plugins = ["tests.support.gateway_fixtures"]
pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())


@pytest.fixture
def gate(shared_gate: Gate) -> Gate:
    return shared_gate.as_new()


async def test_the_root_is_the_page_and_all_that_it_names_is_there(gate: Gate) -> None:
    async with gate.http() as http:
        page = await http.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.content == (FOLDER / "index.html").read_bytes()
        named = re.findall(r'(?:href|src)="(/[^"#]*)"', page.text)
        assert named
        for path in named:
            assert (await http.get(path)).status_code == 200, path


async def test_every_file_has_its_type_and_may_load_from_here_only(gate: Gate) -> None:
    async with gate.http() as http:
        for name in FILES:
            answer = await http.get(f"/dashboard/{name}")
            assert answer.content == (FOLDER / name).read_bytes(), name
            assert answer.headers["content-type"] == TYPES.get(Path(name).suffix, "text/plain; charset=utf-8")
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_page_that_the_browser_has_is_not_sent_again(gate: Gate) -> None:
    async with gate.http() as http:
        first = await http.get("/dashboard/main.js")
        assert first.headers["cache-control"] == "no-cache"
        given = {"if-none-match": f'"another", W/{first.headers["etag"]}'}
        again = await http.get("/dashboard/main.js", headers=given)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert (await http.get("/dashboard/feed.js", headers=given)).status_code == 200


async def test_head_says_what_get_would_send(gate: Gate) -> None:
    async with gate.http() as http:
        for path in ("/", "/dashboard/theme.css"):
            head, full = await http.head(path), await http.get(path)
            assert (head.status_code, head.content) == (200, b"")
            for name in ("content-length", "content-type", "etag"):
                assert head.headers[name] == full.headers[name]


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/../app.py",
        "/dashboard/%2e%2e/app.py",
        "/dashboard/..%2fapp.py",
        "/dashboard//etc/passwd",
        "/dashboard/%2Fetc%2Fpasswd",
        "/dashboard/vendor",
        "/dashboard/",
        "/dashboard/main.js%00.css",
    ],
)
async def test_no_path_leads_out_of_the_folder(gate: Gate, path: str) -> None:
    async with gate.connection() as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
    assert b" 404 Not Found" in answer and b"root:" not in answer and b"import " not in answer


async def test_the_pages_need_no_key_and_show_nothing_without_it(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, admin_keys=["hush-hush"]) as gate, gate.http() as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/dashboard/main.js")).status_code == 200
        assert (await http.get("/admin/live")).status_code == 401
