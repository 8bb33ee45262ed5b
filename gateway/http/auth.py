"""API keys: one set for /v1, one for /admin, and the keys of the file in both, each with its scopes.

Every key is compared, in constant time, so that the time of an answer shows nothing of a key.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from bus.api_keys import ANONYMOUS, ApiKey, Scope, digest_of, plain_key
from bus.settings import is_loopback
from gateway.errors import ApiError, bad_key

Headers = Iterable[tuple[bytes, bytes]]

HEADER = "Authorization: Bearer <key>"
API_HINT = "; /v1 takes a key of gateway.api_keys, and those of /admin do not open it"
ADMIN_HINT = "; /admin has keys of its own (gateway.admin_keys), and those of /v1 do not open it"

# Nobody can register a name in these: RFC 6761, RFC 6762, ICANN's resolution of 2024, RFC 8375, and svc of
# Kubernetes.
PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".home.arpa", ".svc")


class Keys:
    """The keys of one API: those of the settings, which have `scopes`, and those of the file of keys.

    `hint`: says in a refusal which keys these are. `is_closed`: without a key nobody may call.
    """

    def __init__(
        self,
        keys: Iterable[str],
        hint: str = "",
        scopes: tuple[Scope, ...] = ("inference",),
        *,
        is_closed: bool = False,
    ) -> None:
        self._hint, self._scopes, self._is_closed = hint, scopes, is_closed
        self._own = [plain_key(key, *scopes) for key in keys]
        self.replace_stored([])

    def __bool__(self) -> bool:
        return self._is_closed or self._num_opening > 0

    def __len__(self) -> int:
        return self._num_opening

    def replace_stored(self, stored: Iterable[ApiKey]) -> None:
        """Take the keys that the file has now."""
        self._keys = [*self._own, *stored]
        self._num_opening = sum(any(map(key.may, self._scopes)) for key in self._keys)

    def check(self, headers: Headers, scope: Scope = "inference") -> ApiKey:
        """Return the caller's key; ANONYMOUS if none is needed. Raises ApiError 401, or 403 for its scope."""
        if not self:
            return ANONYMOUS
        given = _bearer(headers)
        if given is None:
            raise bad_key(f"no API key: send the header `{HEADER}`{self._hint}")
        digest = digest_of(given)
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        if not matches:
            raise bad_key(f"the API key in the header `{HEADER}` is not known here{self._hint}")
        if not matches[0].may(scope):
            raise _out_of_scope(matches[0], scope)
        return matches[0]


def check_admin(
    keys: Keys, headers: Headers, host: str, *, loopback_only: bool, scope: Scope = "admin-write"
) -> None:
    """Check a call of /admin. Raises ApiError 401 or 403.

    Without keys only this machine may make one, and no page of another site. `loopback_only`: no other
    machine can connect.
    """
    if keys:
        keys.check(headers, scope)
        return
    if not loopback_only and not is_loopback(host.removeprefix("::ffff:")):  # IPv4 on an IPv6 socket
        raise _forbidden("answers this machine only; set a key to use it from another")
    own, origin = _host_and_origin(headers)
    if own is not None and not is_loopback(_name_of(own)):  # DNS rebinding: another name with our address
        raise _forbidden(
            f"is not answered under the host {own.decode('latin-1')!r}, only localhost; set a key"
        )
    if origin is not None and _is_of_another_page(own, origin):
        raise _forbidden(f"is not answered to pages of {origin.decode('latin-1')!r}; set a key")


def check_api(keys: Keys, headers: Headers, trusted_origins: Collection[str] = ()) -> ApiKey:
    """Check a call of /v1, and return its key, ANONYMOUS without keys. Raises ApiError 401 or 403.

    Without keys, no page of a public site may call from its visitor's browser: neither under its own name,
    which it has turned to this address (DNS rebinding), nor across sites, which a browser does unasked for
    requests that a form could send. `trusted_origins` may.
    """
    if keys:
        return keys.check(headers)
    own, origin = _host_and_origin(headers)
    if own is not None and _may_be_public(_name_of(own)):
        raise _forbidden_api(f"under the host {own.decode('latin-1')!r}, which a page may have chosen")
    if origin is None or origin.decode("latin-1") in trusted_origins:
        return ANONYMOUS
    if _is_of_another_page(own, origin) and _is_of_the_web(origin):
        raise _forbidden_api(f"to pages of {origin.decode('latin-1')!r}")
    return ANONYMOUS


def _host_and_origin(headers: Headers) -> tuple[bytes | None, bytes | None]:
    """Return the Host header, and the Origin header, which a page's requests have."""
    given = dict(headers)
    return given.get(b"host"), given.get(b"origin")


def _is_of_another_page(own: bytes | None, origin: bytes) -> bool:
    return own is None or origin not in (b"http://" + own, b"https://" + own)


def _may_be_public(name: str) -> bool:
    """Return False for addresses and for names that nobody can register: single words and private domains."""
    text = name.lower().strip("[].")
    return _address(text) is None and not _is_private(text)


def _is_of_the_web(origin: bytes) -> bool:
    """Return False for pages of this machine and of private networks, and for schemes of other programs.

    "null" stands for any page that tells none, as one in a sandbox.
    """
    try:
        parts = urlsplit(origin.decode("ascii"))
        host = (parts.hostname or "").rstrip(".")
    except ValueError:
        return True
    if parts.scheme and parts.scheme not in ("http", "https"):
        return False
    address = _address(host)
    return address.is_global if address else not _is_private(host)


def _is_private(name: str) -> bool:
    return bool(name) and ("." not in name or name.endswith(PRIVATE_DOMAINS))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _out_of_scope(key: ApiKey, scope: Scope) -> ApiError:
    message = (
        f"the API key {key.name!r} may do {', '.join(key.scopes)}, and this takes {scope}; "
        f"`instar keys add NAME --scope {scope}` makes one that may"
    )
    return ApiError(403, message, code="insufficient_scope")


def _forbidden_api(how: str) -> ApiError:
    message = f"gateway.api_keys is empty, so /v1 is not answered {how}; set a key"
    return ApiError(403, message, code="api_host_refused")


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
