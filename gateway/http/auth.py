"""API keys: one set for /v1, one for /admin.

Every key is compared, in constant time, so that the time of an answer shows nothing of a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from bus.settings import is_loopback
from gateway.errors import ApiError, bad_key

Headers = Iterable[tuple[bytes, bytes]]

HEADER = "Authorization: Bearer <key>"
API_HINT = "; /v1 takes a key of gateway.api_keys, and those of /admin do not open it"
ADMIN_HINT = "; /admin has keys of its own (gateway.admin_keys), and those of /v1 do not open it"


class Keys:
    """A set of keys, held as digests. `hint`: says in a refusal which keys these are."""

    def __init__(self, keys: Iterable[str], hint: str = "") -> None:
        self._hint = hint
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Headers) -> str:
        """Return a name for the caller's key; "" if no keys are configured. Raises ApiError 401."""
        if not self._digests:
            return ""
        given = _bearer(headers)
        if given is None:
            raise bad_key(f"no API key: send the header `{HEADER}`{self._hint}")
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise bad_key(f"the API key in the header `{HEADER}` is not known here{self._hint}")
        return digest.hex()[:16]


def check_admin(keys: Keys, headers: Headers, host: str, *, loopback_only: bool) -> None:
    """Check a call of /admin. Raises ApiError 401 or 403.

    Without keys only this machine may make one, and no page of another site. `loopback_only`: no other
    machine can connect.
    """
    if keys:
        keys.check(headers)
        return
    if not loopback_only and not is_loopback(host.removeprefix("::ffff:")):  # IPv4 on an IPv6 socket
        raise _forbidden("answers this machine only; set a key to use it from another")
    given = dict(headers)
    own, origin = given.get(b"host"), given.get(b"origin")
    if own is not None and not is_loopback(_name_of(own)):  # DNS rebinding: another name with our address
        raise _forbidden(
            f"is not answered under the host {own.decode('latin-1')!r}, only localhost; set a key"
        )
    if origin is not None and (own is None or origin not in (b"http://" + own, b"https://" + own)):
        raise _forbidden(f"is not answered to pages of {origin.decode('latin-1')!r}; set a key")


def _forbidden(why: str) -> ApiError:
    message = f"gateway.admin_keys is empty, so /admin {why}"
    return ApiError(403, message, code="admin_loopback_only")


def _name_of(host: bytes) -> str:
    """Return the name in a Host header: localhost:8000 -> localhost, [::1]:8000 -> [::1]."""
    text = host.decode("latin-1")
    return text[: text.find("]") + 1] if text.startswith("[") else text.partition(":")[0]


def _bearer(headers: Headers) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else None
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
