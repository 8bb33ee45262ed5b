"""Files of certificates and keys: each that cannot serve is named, with what to do."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from bus.tls import TLSProblem, pinned_context, server_context, shake_hands
from tests.support.certificates import Authority, authority

__all__ = ["authority"]


def problem(cert: str | Path, key: str | Path = "") -> str:
    with pytest.raises(TLSProblem) as caught:
        server_context(str(cert), str(key), setting="gateway")
    return str(caught.value)


def test_a_certificate_with_its_key_serves_who_trusts_its_authority(authority: Authority) -> None:
    pair = authority.sign("server")
    server = server_context(pair.cert, pair.key, setting="gateway")
    client = ssl.create_default_context(cafile=authority.ca)
    client.check_hostname = False
    shake_hands(server, client)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, ssl.create_default_context())


def test_a_pinned_certificate_is_the_only_one_taken(authority: Authority) -> None:
    pair, other = authority.sign("pinned"), authority.sign("other")
    shake_hands(server_context(pair.cert, pair.key, setting="gateway"), pinned_context(pair.cert))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_context(other.cert, other.key, setting="gateway"), pinned_context(pair.cert))


def test_a_missing_file_is_named(authority: Authority, tmp_path: Path) -> None:
    pair = authority.sign("present")
    absent = tmp_path / "absent.pem"
    assert f"gateway.ssl_certfile {absent} cannot be read: No such file" in problem(absent, pair.key)
    assert f"gateway.ssl_keyfile {absent} cannot be read" in problem(pair.cert, absent)
    assert f"gateway.ssl_keyfile {pair.cert} has no line with" in problem(pair.cert)
    assert f"gateway.ssl_certfile {pair.key} has no line with" in problem(pair.key, pair.cert)


def test_a_file_that_is_damaged_is_named(authority: Authority, tmp_path: Path) -> None:
    pair, cut = authority.sign("whole"), tmp_path / "cut.pem"
    cut.write_text(Path(pair.cert).read_text()[:200])
    assert f"gateway.ssl_certfile {cut}" in problem(cut, pair.key)


def test_a_key_of_another_certificate_is_named(authority: Authority) -> None:
    one, other = authority.sign("one"), authority.sign("another")
    assert f"ssl_keyfile {other.key} is not the key of the certificate {one.cert}" in problem(
        one.cert, other.key
    )


def test_an_expired_certificate_is_named(authority: Authority) -> None:
    pair = authority.sign("old", days=-1)
    assert f"ssl_certfile {pair.cert}: certificate has expired; renew" in problem(pair.cert, pair.key)


def test_a_key_with_a_password_is_named(authority: Authority, tmp_path: Path) -> None:
    pair, locked = authority.sign("locked"), tmp_path / "locked.key"
    authority.openssl("pkey", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", str(locked))
    assert f"ssl_keyfile {locked} has a password" in problem(pair.cert, locked)
