"""Where the gateway listens and how to reach it from here."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

from bus.settings import GatewaySettings, is_loopback

EVERY_ADDRESS = ("", "0.0.0.0", "::")


def url_of(gateway: GatewaySettings) -> str:
    """http://host:port as a client on this machine writes it."""
    host = "127.0.0.1" if gateway.host in EVERY_ADDRESS else gateway.host.strip("[]")
    return f"http://[{host}]:{gateway.port}" if ":" in host else f"http://{host}:{gateway.port}"


def is_own(gateway: GatewaySettings, url: str | None) -> bool:
    """Whether `url` (None: not given) is where the service of these settings is reached. Their keys are of
    that service, and no business of another's server."""
    if url is None:
        return True
    own = urlsplit(url_of(gateway))
    try:
        at = urlsplit(url)
        port = at.port or (443 if at.scheme == "https" else 80)
    except ValueError:  # it is no URL, as whoever asks it will say
        return False
    host = at.hostname or ""
    return port == own.port and (host == own.hostname or is_loopback(host))


def why_not_listen(host: str, port: int) -> str:
    """One line that says what keeps a server from listening there and what to do; "" if nothing does."""
    place = f"port {port} of {host or 'every address'}"
    try:
        address = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(address[0], address[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what just closed is no hindrance
            probe.bind(address[4])
            probe.listen(1)  # two may bind with SO_REUSEADDR; only one may listen
    except socket.gaierror as error:
        return f"{host!r} is no address of this machine ({error.strerror}); gateway.host may be 127.0.0.1"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"{place} is in use: end the program that listens there (`ss -ltnp` names it), or take "
                f"another port: `instar serve --port {_another(port)}` or INSTAR_PORT={_another(port)}"
            )
        if error.errno == errno.EACCES:
            return f"{place} may only be opened by root; take one above 1023: `instar serve --port 8000`"
        return f"{place} cannot be opened: {error.strerror}; gateway.host may be 127.0.0.1"
    return ""


def _another(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
