"""Records of models and deployments, and orders that take effect once or never."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bus.batch import key_of
from bus.catalogue import Contents
from bus.checkpoints import BadCheckpoint, folder_digest, read_checkpoint
from bus.client import Bus, BusUnavailable, connect
from bus.deployments import Answer, Deployment, Intent, ModelCard, Profile, RegisterModel
from bus.settings import Settings
from controller.deployments.deployer import Deployer
from controller.failures import Failures
from tests.conftest import settings_of
from tests.support.redis_process import RedisProcess

MODEL = ModelCard(name="m", path="/m", digest="d", num_layers=2, state="registered")
DEPLOYMENT = Deployment(id="a1", model="m", intent=Intent(), state="waiting")
PROFILE = Profile(
    model="m",
    digest="d",
    device="cpu",
    version="1",
    num_layers=2,
    block_bytes_per_layer=1024,
    block_tokens=16,
    latency=[],
    memory=[],
)
ORDER = RegisterModel(id="o1", name="m", path="/m")
DONE = Answer(id="o1", status=201, model=MODEL)


async def test_what_was_written_is_read_in_one_picture(bus: Bus) -> None:
    assert await bus.catalogue.read() == Contents()
    await bus.catalogue.write(MODEL, DEPLOYMENT, PROFILE)
    contents = await bus.catalogue.read()
    assert contents == Contents({"m": MODEL}, {"a1": DEPLOYMENT}, {("m", "cpu"): PROFILE})
    assert contents.records == [MODEL, DEPLOYMENT, PROFILE]


async def test_records_and_commands_go_out_together(bus: Bus) -> None:
    batch = bus.batch()
    batch.write(MODEL)
    batch.publish(bus.names.orders, ORDER)
    await batch.send()
    assert (await bus.catalogue.read()).models == {"m": MODEL}
    assert await bus.length(bus.names.orders) == 1


async def test_an_order_changes_its_records_with_its_answer_and_once(bus: Bus) -> None:
    entry = await bus.catalogue.order(ORDER)
    assert await bus.catalogue.settle(entry, DONE, write=[MODEL])
    assert not await bus.catalogue.settle(entry, DONE, remove=[MODEL])
    assert await bus.catalogue.await_answer("o1", entry, 1.0) == DONE
    assert (await bus.catalogue.read()).models == {"m": MODEL}
    assert await bus.length(bus.names.orders) == 0


async def test_a_record_is_removed_by_an_order(bus: Bus) -> None:
    await bus.catalogue.write(MODEL, PROFILE)
    entry = await bus.catalogue.order(ORDER)
    await bus.catalogue.settle(entry, DONE, remove=[MODEL, PROFILE])
    assert await bus.catalogue.read() == Contents()


async def test_an_order_nobody_takes_is_withdrawn_and_never_carried_out(bus: Bus) -> None:
    entry = await bus.catalogue.order(ORDER)
    assert await bus.catalogue.await_answer("o1", entry, 0.05) is None
    assert not await bus.catalogue.settle(entry, DONE, write=[MODEL])
    assert await bus.catalogue.read() == Contents()


async def test_an_answer_ends_the_wait_when_it_comes(bus: Bus) -> None:
    entry = await bus.catalogue.order(ORDER)
    waiting = asyncio.create_task(bus.catalogue.await_answer("o1", entry, 5.0))
    await asyncio.sleep(0.05)
    await bus.catalogue.settle(entry, DONE)
    assert await waiting == DONE


async def test_a_restart_is_told_before_an_empty_catalogue_is_shown(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis()
    told: list[bool] = []
    async with connect(settings_of(server.url)) as bus:
        bus.on_restart(lambda restart: told.append(restart.data_lost))
        await bus.catalogue.write(MODEL)
        server.kill()
        with pytest.raises(BusUnavailable):
            await bus.catalogue.read()
        server.start()
        await bus.wait_up()
        assert await bus.catalogue.read() == Contents()
        assert told == [True]


async def test_the_controller_writes_again_what_redis_lost(own_redis: Callable[..., RedisProcess]) -> None:
    server = own_redis()
    async with connect(settings_of(server.url)) as bus:
        deployer = Deployer(Settings(), bus, Failures(bus))
        known = Contents({"m": replace(MODEL, state="failed")}, {"a1": replace(DEPLOYMENT, state="failed")})
        await bus.catalogue.write(*known.records)
        await deployer.step()
        server.kill()
        with pytest.raises(BusUnavailable):
            await deployer.step()
        server.start()
        await bus.wait_up()
        assert await bus.catalogue.read() == Contents()
        await deployer.step()
        assert await bus.catalogue.read() == known


async def test_the_controller_writes_again_what_a_failover_lost_and_nothing_older(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis(append_only=True)
    async with connect(settings_of(server.url)) as bus:
        deployer = Deployer(Settings(), bus, Failures(bus))
        lost, newer = (
            replace(MODEL, name="lost", state="failed"),
            replace(MODEL, state="failed", reason="new"),
        )
        await bus.catalogue.write(replace(MODEL, state="failed"), lost)
        await deployer.step()
        with server.client() as client:
            client.delete(key_of(bus.names, lost))
        await bus.catalogue.write(newer)
        server.kill()
        with pytest.raises(BusUnavailable):
            await deployer.step()
        server.start()
        await bus.wait_up()
        async with asyncio.timeout(5):
            while "lost" not in (await bus.catalogue.read()).models:
                await deployer.step()
        assert (await bus.catalogue.read()).models == {"m": newer, "lost": lost}


def folder_of(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3} | config))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_a_checkpoint_is_another_when_its_weights_or_its_config_change(tmp_path: Path) -> None:
    first = read_checkpoint(folder_of(tmp_path))
    assert first.num_layers == 3
    (tmp_path / "profile.json").write_text("{}")  # what is stored beside it is none of it
    assert folder_digest(tmp_path) == first.digest
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    second = folder_digest(tmp_path)
    assert second != first.digest
    folder_of(tmp_path, num_hidden_layers=4)
    assert folder_digest(tmp_path) not in (first.digest, second)


GPT2 = '{"architectures": ["GPT2LMHeadModel"], "n_layer": 12}'
UNSUPPORTED = "architecture GPT2LMHeadModel is not supported; these are: LlamaForCausalLM, .*Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "no config.json"),
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list, not an object"),
        ("{}", "num_hidden_layers = None"),
        (GPT2, UNSUPPORTED),
    ],
)
def test_a_folder_that_is_no_model_is_refused_by_what_it_lacks(
    tmp_path: Path, text: str | None, complaint: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=complaint):
        read_checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match="there is no folder"):
        read_checkpoint(tmp_path / "none")
    with pytest.raises(BadCheckpoint, match=r"x+ cannot be opened: File name too long"):
        read_checkpoint(tmp_path / ("x" * 300))
