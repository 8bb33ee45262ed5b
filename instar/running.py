"""The services that run on this machine, and their URLs.

`instar serve` writes its URL to a file of this user's runtime folder and holds a lock on it. The kernel drops
the lock when the process ends, however it ends, so a file without a lock names no service.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bus.settings import GatewaySettings, is_loopback
from bus.tls import pinned_context
from instar.errors import InputError

EVERY_ADDRESS = ("", "0.0.0.0", "::")
DEMO = "demo.lock"  # the file that holds the address of the demo that runs


def runtime_folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"instar-{os.getuid()}"


@contextmanager
def announced(url: str) -> Iterator[None]:
    """Let `running_services` find `url` within the block. Without a writable folder it is not found."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = runtime_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{urlsplit(url).port}.url"
            file = stack.enter_context(path.open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(url)
            file.flush()
            stack.callback(path.unlink, missing_ok=True)
        yield


@contextmanager
def sole_demo(url: str) -> Iterator[None]:
    """Run the block if no other demo of this user runs. Raises InputError with the address of the other."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a writable folder none is found
            folder = runtime_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = stack.enter_context((folder / DEMO).open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise InputError(
                    f"a demo runs already: {file.read() or 'it is just starting'}; watch that one, or end it "
                    "with Ctrl-C where it was started"
                ) from None
            file.truncate(0)
            file.write(url)
            file.flush()
        yield


def running_services() -> list[str]:
    """URLs of this user's services on this machine."""
    found, folder = [], runtime_folder()
    with contextlib.suppress(OSError):
        if folder.stat().st_uid != os.getuid():
            return []
        for path in sorted(folder.glob("*.url")):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(file.read())
    return found


def url_of(gateway: GatewaySettings) -> str:
    """Return the URL by which a client on this machine reaches the gateway."""
    host = "127.0.0.1" if gateway.host in EVERY_ADDRESS else gateway.host.strip("[]")
    scheme = "https" if gateway.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{gateway.port}" if ":" in host else f"{scheme}://{host}:{gateway.port}"


def trust_of(gateway: GatewaySettings, *, is_own: bool) -> ssl.SSLContext | bool:
    """Return what a client verifies the gateway's certificate with, as httpx takes it.

    The gateway of the settings must have the very certificate that they name, whatever it says of hosts.
    Others are verified as the system does, or by SSL_CERT_FILE. Raises InputError.
    """
    if not (gateway.ssl_certfile and is_own):
        return True
    try:
        return pinned_context(gateway.ssl_certfile)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "strerror", "") or error
        raise InputError(
            f"gateway.ssl_certfile {gateway.ssl_certfile} cannot be read: {why}; name the gateway's "
            "certificate, or give --url"
        ) from error


def locate(gateway: GatewaySettings, url: str | None) -> tuple[str, bool]:
    """Return the URL to ask and whether the keys of the settings may go there.

    Without `url` it is that of the settings if they name a host or port, else that of the one service that
    runs on this machine. Raises InputError for a bad URL, and if several services run.
    """
    if url is not None:
        _check_url(url)
        return url, _is_own(gateway, url)
    if gateway.port and gateway.model_fields_set & {"host", "port"}:
        return url_of(gateway), True
    running = running_services()
    if len(running) > 1:
        raise InputError(f"{len(running)} services run here: {', '.join(running)}; choose one with --url")
    return (running or [url_of(gateway)])[0], True


def _check_url(url: str) -> None:
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("the URL needs http://")
        if "@" in url:  # run.json and the picture of a replay show the URL
            raise InputError("--url holds a name or a password, which are not sent; use --api-key KEY")
        found = urlsplit(url)
        host, _ = (found.hostname or "").encode("idna"), found.port  # either may raise
        if not host:
            raise ValueError("it has no host")
    except ValueError as error:
        raise InputError(f"--url {url}: {error}; write it as http://127.0.0.1:8000") from error


def _is_own(gateway: GatewaySettings, url: str) -> bool:
    own, at = urlsplit(url_of(gateway)), urlsplit(url)
    port, host = at.port or (443 if at.scheme == "https" else 80), at.hostname or ""
    return port == own.port and (host == own.hostname or is_loopback(host))
