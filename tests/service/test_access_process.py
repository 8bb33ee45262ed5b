"""The whole service on a Redis whose users may do no more than the table of `bus.access` says.

The links between its workers are encrypted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.common.service import wait_for
from bus.access import ROLES
from tests.support.certificates import Authority
from tests.support.secured_service import SETTINGS, SecuredService, complete

pytestmark = pytest.mark.timeout(600)


def test_requests_groups_over_encrypted_links_morphs_and_a_death_need_no_other_right(tmp_path: Path) -> None:
    service = SecuredService(num_workers=2, settings=SETTINGS)
    service.authorities = (Authority(tmp_path / "a"),) * 2
    with service:
        service.set_policy(mode="manual")
        text = complete(service)
        for tp in (2, 1):
            service.apply("transform", {"workers": ["w0", "w1"], "tp": tp})
            assert complete(service) == text
        service.apply("demo@w0/swap", {"count": 1, "precision": "int8"})
        service.apply("transform", {"workers": ["w0", "w1"], "tp": 2})
        assert complete(service)
        service.apply("transform", {"workers": ["w0", "w1"], "tp": 1})
        service.processes["w1"].kill()
        wait_for("the death to be noticed", lambda: service.serving_workers() == {"w0"}, 60)
        assert complete(service)
        assert service.processes["w0"].terminate() == 0
        assert service.processes["gateway0"].terminate() == 0
        assert service.refused() == []
        _are_distinct(service.folder / "secrets")


def _are_distinct(folder: Path) -> None:
    assert len({(folder / role / "password").read_text() for role in ROLES}) == len(ROLES)
