"""Processes with encrypted links: a group of workers forms, and one of another authority is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.service import Process
from tests.service.test_access_process import SETTINGS, SecuredService, complete
from tests.support.certificates import Authority

pytestmark = pytest.mark.timeout(600)


class LinkedService(SecuredService):
    """Each worker has a certificate; `authorities` has those that sign for w0, w1, ..."""

    authorities: tuple[Authority, ...] = ()

    def add_worker(self, worker: str) -> Process:
        authority = self.authorities[int(worker[1:])]
        pair = authority.sign(worker)
        files = {"CERTFILE": pair.cert, "KEYFILE": pair.key, "CA_CERTS": authority.ca}
        self.settings = self.settings | {f"WORKER__SSL_{name}": file for name, file in files.items()}
        return super().add_worker(worker)


def transform(service: LinkedService, tp: int) -> dict[str, Any]:
    url = f"{service.url()}/admin/instances/transform"
    body = {"workers": ["w0", "w1"], "tp": tp}
    found: dict[str, Any] = httpx.post(url, params={"wait": "true"}, json=body, timeout=120).json()
    return found


def test_a_group_forms_over_encrypted_links_and_parts(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "a")
    service = LinkedService(num_workers=2, settings=SETTINGS)
    service.authorities = (authority, authority)
    with service:
        service.set_policy(mode="manual")
        text = complete(service)
        for tp in (2, 1):
            assert transform(service, tp)["state"] == "applied"
            assert complete(service) == text


def test_a_worker_of_another_authority_is_refused_by_name_and_both_serve_on(tmp_path: Path) -> None:
    service = LinkedService(num_workers=2, settings=SETTINGS)
    service.authorities = (Authority(tmp_path / "a"), Authority(tmp_path / "b", "another"))
    with service:
        service.set_policy(mode="manual")
        text = complete(service)
        morph = transform(service, 2)
        assert morph["state"] == "failed"
        assert "w1: " in morph["reason"] and "its certificate is not of this cluster" in morph["reason"]
        assert complete(service) == text
        assert service.serving_workers() == {"w0", "w1"}
