"""Fixtures of the bus: a real Redis for all tests, told apart by key prefix, and one to be harmed."""

from __future__ import annotations

import gc
import os
import random
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import pytest

from bus.client import Bus, connect
from bus.settings import RedisSettings
from tests.support.redis_process import RedisProcess

if TYPE_CHECKING:  # torch and numba are imported where they are needed
    from kernels.product import Product

TESTS = Path(__file__).parent
OUTSIDE = os.environ.copy()  # for a process that leaves this machine
PARALLEL = (TESTS / "kernels", TESTS / "worker" / "model")  # compute with a thread for each core

pytest_plugins = ["tests.support.fault_table"]  # here, since pytest-xdist prints where no test is collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process works alone at the end (`--no-loadscope-reorder`).

    Kernels come first: they are compiled on the way, and the services of the next tests find them so.
    """
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if TESTS / "kernels" in item.path.parents:
        return 0
    return 1 if item.path.name.endswith("_process.py") else 2


def pytest_collection_finish() -> None:
    """Keep what is imported by now, torch above all: a collection that looks at it takes half a second, and
    some tests collect on purpose."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what draws without a generator of its own, fixtures too: what failed can then be repeated.

    Only tests of kernels and models compute with a thread for each core. Processes that run tests side by
    side would wait for each other's threads elsewhere, which takes a quarter of the time.
    """
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        is_parallel = any(folder in item.path.parents for folder in PARALLEL)
        torch.set_num_threads(len(os.sched_getaffinity(0)) if is_parallel else 1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure on the machine for them and the processes that they start alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _trust_one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let clients of HTTP read one certificate in place of all there are, which each does anew.

    No test but that of the wheel leaves loopback.
    """
    end = "-----END CERTIFICATE-----\n"
    first = tmp_path_factory.mktemp("certificates") / "first.pem"
    first.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(first))
        yield


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_not_timed() -> Iterator[None]:
    """Let models that this process loads take the kernels of the built-in rule.

    Timing takes up to 2 s for each model, and its result would differ from run to run.
    """
    import kernels
    from kernels.cpu.choice import TABLE, describe

    choose = kernels.choose_products

    def choose_unmeasured(products: Iterable[Product], model: str, device: object = "cpu") -> list[str]:
        wanted = list(products)
        told = [] if all(map(TABLE.fixed, wanted)) else describe({product: {} for product in wanted})
        return told or choose(wanted, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "choose_products", choose_unmeasured)
        yield


@pytest.fixture(autouse=True)
def _no_choice_of_kernels_outlives_a_test() -> Iterator[None]:
    yield
    if choice := sys.modules.get("kernels.cpu.choice"):
        choice.TABLE.forget()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """Shared by all tests: not to be stopped, flushed or filled. Use it through `redis_settings`."""
    with RedisProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_settings(redis_server: RedisProcess) -> RedisSettings:
    """Settings of the shared server with a key prefix of this test's own; blocks and waits are short."""
    return settings_of(redis_server.url)


@pytest.fixture
async def bus(redis_settings: RedisSettings) -> AsyncIterator[Bus]:
    """A started bus on the shared server."""
    async with connect(redis_settings, source="test") as started:
        yield started


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Callable[..., RedisProcess]]:
    """`own_redis("--maxmemory", "8mb", append_only=False)`: a started server that the test may harm."""
    with ExitStack() as stack:

        def start(*options: str, append_only: bool = False) -> RedisProcess:
            return stack.enter_context(RedisProcess(tmp_path, *options, append_only=append_only))

        yield start


def settings_of(url: str) -> RedisSettings:
    return RedisSettings(url=url, prefix=f"test-{uuid.uuid4().hex[:8]}:", socket_timeout_s=2.0, block_ms=300)
