"""Processes with encrypted links: a worker of another authority is left out of groups.

`test_access_process.py` has a group of workers whose certificates are of one.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.certificates import Authority
from tests.support.secured_service import SETTINGS, SecuredService, complete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_worker_of_another_authority_is_refused_by_name_and_both_serve_on(tmp_path: Path) -> None:
    service = SecuredService(num_workers=2, settings=SETTINGS)
    service.authorities = (Authority(tmp_path / "a"), Authority(tmp_path / "b", "another"))
    with service:
        service.set_policy(mode="manual")
        text = complete(service)
        url = f"{service.url()}/admin/instances/transform"
        body = {"workers": ["w0", "w1"], "tp": 2}
        morph = httpx.post(url, params={"wait": "true"}, json=body, timeout=120).json()
        assert morph["state"] == "failed"
        assert "w1: " in morph["reason"] and "its certificate is not of this cluster" in morph["reason"]
        assert complete(service) == text
        assert service.serving_workers() == {"w0", "w1"}
