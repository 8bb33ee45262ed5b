"""The gateway process: bind, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
import sys
from collections.abc import Iterator
from typing import NoReturn

import uvicorn

from bus.api_keys import KeysFileError
from bus.client import Bus, BusUnavailable
from bus.settings import GatewaySettings, Settings, SettingsError
from bus.tls import TLSProblem, server_context
from gateway.app import create_app
from gateway.http.connection import Protocol
from gateway.loops import LEASE_S
from gateway.operations.live import Feeds
from gateway.state import Gateway

log = logging.getLogger("gateway")

CONFIGURATION_ERROR = 2  # the same settings will fail again
FAILED = 1
LEFTOVERS_S = 3  # time for connections still open after the drain
SEND_BUFFER = 256 * 1024  # bytes that the kernel keeps for a client that does not read


class GatewayServer(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM means drain first, then exit with status 0."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._leave = asyncio.Event()
        self._tls = tls

    def leave(self) -> None:
        """End `serve`."""
        self.should_exit = True
        self._leave.set()

    async def main_loop(self) -> None:
        """Run uvicorn's tick once a second instead of ten times, and end as soon as `leave` is called."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leave.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn would give a client a minute for its handshake, so TLS is set up here."""
        await super().startup([] if self._tls else sockets)
        if self.started and sockets:
            if self._tls:
                self.servers.append(await self._listen(sockets[0], self._tls))
            log.info("listening on %s://%s", "https" if self._tls else "http", _address(sockets[0]))

    async def _listen(self, listener: socket.socket, tls: ssl.SSLContext) -> asyncio.Server:
        make = functools.partial(
            Protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return await asyncio.get_running_loop().create_server(
            make,
            sock=listener,
            ssl=tls,
            backlog=self.config.backlog,
            ssl_handshake_timeout=Protocol.header_timeout_s,
            ssl_shutdown_timeout=LEFTOVERS_S,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def main(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    """Serve until `stop`, then drain. Exits with status 2 for a setting, 1 if a background task failed."""
    section = settings.gateway
    if not section.loopback_only and not (section.api_keys or section.keys_file):
        _fail(
            f"gateway.host = {section.host!r} is open to others and gateway.api_keys is empty; "
            "set a key (INSTAR_GATEWAY__API_KEYS), or host = 127.0.0.1"
        )
    tls = _tls(section)
    listener = _bind(section)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as many connections as the system permits
    Protocol.header_timeout_s = section.header_timeout_s
    Protocol.write_timeout_s = section.write_timeout_s
    Protocol.max_connections = section.max_connections
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        gateway = Gateway(settings, bus)
    except (SettingsError, KeysFileError) as error:
        listener.close()
        _fail(str(error))
    with contextlib.suppress(BusUnavailable):  # then the start says so
        await bus.refuse_namesake("gateway", gateway.id, LEASE_S)
    feeds = Feeds(gateway)
    died = asyncio.Event()
    config = uvicorn.Config(
        create_app(gateway, feeds, died.set),
        http=Protocol,
        loop="none",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LEFTOVERS_S,
    )
    server = GatewayServer(config, tls)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await _first_of(serving, stop, died)
    if stop.is_set() and not died.is_set():
        log.info("draining: %d in flight", gateway.admission.inflight)
        await gateway.drain(section.drain_timeout_s)
        feeds.close()
    server.leave()
    await serving
    if gateway.tracer is not None:
        await gateway.tracer.close()
    if died.is_set() or not server.started:
        sys.exit(FAILED)


async def _first_of(serving: asyncio.Task[None], *events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait([serving, *waits], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _tls(section: GatewaySettings) -> ssl.SSLContext | None:
    if not section.ssl_certfile:
        return None
    try:
        return server_context(section.ssl_certfile, section.ssl_keyfile, setting="gateway")
    except TLSProblem as problem:
        _fail(str(problem))


def _bind(section: GatewaySettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # its connections inherit it
    try:
        listener.bind((section.host, section.port))
    except OSError as error:
        listener.close()
        _fail(
            f"cannot listen on {section.host} port {section.port}: {error.strerror or error}; "
            "set another gateway.port (INSTAR_PORT) or gateway.host, or stop who uses it"
        )
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _fail(message: str) -> NoReturn:
    log.error(message)
    sys.exit(CONFIGURATION_ERROR)
