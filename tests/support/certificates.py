"""Certificates of an authority of the test's own, made by `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: str
    key: str


class Authority:
    """An authority that signs certificates in a folder of its own; `ca` is its certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._own = folder, self._make(folder, name)
        self.ca = self._own.cert

    def sign(self, name: str, *, days: int = 30, hosts: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        """Return a certificate of `name`; days: until it expires, negative for one that has."""
        folder = self._folder
        pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
        request, extra = str(folder / f"{name}.csr"), folder / f"{name}.ext"
        extra.write_text(f"subjectAltName={hosts}\nbasicConstraints=CA:FALSE\n")
        _openssl("req", *KEY, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        signer = ("-CA", self._own.cert, "-CAkey", self._own.key, "-CAcreateserial")
        given = ("-in", request, "-out", pair.cert, "-days", str(days), "-extfile", str(extra))
        _openssl("x509", "-req", *signer, *given)
        return pair

    def openssl(self, *arguments: str) -> None:
        _openssl(*arguments)

    def _make(self, folder: Path, name: str) -> Pair:
        pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
        basic = ("-addext", "keyUsage=critical,keyCertSign")
        given = ("-keyout", pair.key, "-out", pair.cert, "-subj", f"/CN={name}", "-days", "30")
        _openssl("req", "-x509", *KEY, *given, *basic)
        return pair


KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
