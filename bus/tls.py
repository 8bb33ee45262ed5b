"""TLS from files: contexts of the standard library, made once at start, with errors that name the file.

A certificate is tried before it is used, in a handshake in memory: `ssl` itself tells of a certificate that
has expired, or that another authority signed, only to the other end, and only when it connects.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Final

PEM_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\s", re.DOTALL)


class TLSProblem(ValueError):
    """A file of a certificate, key or authority that cannot serve: which, why, and what to do."""


def server_context(certfile: str, keyfile: str, *, setting: str) -> ssl.SSLContext:
    """Return the context of a server with this certificate, after a handshake with it in memory.

    certfile: PEM, the server's own certificate first, then those between it and its authority. keyfile: PEM,
    without a password; "": the key is in `certfile`. `setting` is the section of both in the settings.
    Raises TLSProblem.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, certfile, keyfile, setting=setting)
    try:
        shake_hands(context, pinned_context(certfile))
    except ssl.SSLCertVerificationError as error:
        raise TLSProblem(
            f"{setting}.ssl_certfile {certfile}: {error.verify_message}; renew the certificate, and name "
            "its file here"
        ) from error
    except ssl.SSLError as error:
        raise TLSProblem(
            f"{setting}.ssl_certfile {certfile} serves no TLS 1.2 or newer ({error.reason}); make another"
        ) from error
    return context


def load_certificate(context: ssl.SSLContext, certfile: str, keyfile: str, *, setting: str) -> None:
    """Load a certificate and its key into `context`. Raises TLSProblem."""
    _readable(certfile, f"{setting}.ssl_certfile", "-----BEGIN CERTIFICATE-----")
    _readable(keyfile or certfile, f"{setting}.ssl_keyfile", "PRIVATE KEY-----")
    try:
        context.load_cert_chain(certfile, keyfile or None, password=_no_password)
    except TLSProblem as error:
        raise TLSProblem(
            f"{setting}.ssl_keyfile {keyfile or certfile} has a password, which nobody can type here; "
            "`openssl pkey -in FILE -out NEW` writes the key without one"
        ) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TLSProblem(
                f"{setting}.ssl_keyfile {keyfile or certfile} is not the key of the certificate "
                f"{certfile}; name the key that the certificate was made with"
            ) from error
        raise TLSProblem(
            f"{setting}.ssl_certfile {certfile} and ssl_keyfile {keyfile or certfile} cannot be used: "
            f"{error.reason or error}; both must be PEM, the server's own certificate first"
        ) from error


def load_authorities(context: ssl.SSLContext, ca_certs: str, *, setting: str) -> None:
    """Have `context` trust the authorities of a PEM file. Raises TLSProblem."""
    _readable(ca_certs, f"{setting}.ssl_ca_certs", "-----BEGIN CERTIFICATE-----")
    try:
        context.load_verify_locations(cafile=ca_certs)
    except ssl.SSLError as error:
        raise TLSProblem(
            f"{setting}.ssl_ca_certs {ca_certs} cannot be used: {error.reason or error}; it must be PEM"
        ) from error


def pinned_context(certfile: str) -> ssl.SSLContext:
    """Return the context of a client that takes the server with this very certificate, and no other.

    For processes of the server's own machine, which reach it by an address that no certificate names.
    Raises OSError, and ssl.SSLError for a file without a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is the anchor
    first = PEM_CERTIFICATE.search(Path(certfile).read_bytes() + b"\n")
    context.load_verify_locations(cadata=first[0].decode("ascii") if first else "")
    return context


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Make a handshake of both in memory. Raises what the first end that refuses the other raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(10):  # flights of a handshake; TLS 1.3 has three
        waits = False
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waits = True
        if not waits:
            return
    raise ssl.SSLError("the handshake does not end")


def _readable(path: str, setting: str, marker: str) -> None:
    """Raise TLSProblem unless the file can be read and has `marker`."""
    if not path:
        raise TLSProblem(f"{setting} is empty; name a PEM file")
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise TLSProblem(
            f"{setting} {path} cannot be read: {error.strerror}; name a PEM file that this user may read"
        ) from error
    if marker.encode() not in text:
        raise TLSProblem(f"{setting} {path} has no line with {marker!r}; name a PEM file that has it")


def _no_password() -> str:
    raise TLSProblem("a password is asked for")
