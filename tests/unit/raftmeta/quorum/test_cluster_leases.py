"""Brokers with a quorum of three, over real gRPC: they are let in, leased, fenced, and let go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from raftlog.errors import (
    NotController,
    StaleBrokerEpoch,
)
from raftlog.v1.controller_pb2 import HeartbeatRequest
from raftmeta.quorum import channel, controller
from raftmeta.quorum.config import ControllerOptions
from raftmeta.quorum.heartbeat_streams import LocalHeartbeats
from tests.support.quorum import (
    HandBroker,
    QuorumCluster,
    create_topic_command,
    eventually,
    register_command,
    run,
)

PATIENT = ControllerOptions(session_timeout_ms=60_000.0)
"""Nobody is fenced because the machine stands still."""
LONG_LEASE = ControllerOptions(session_timeout_ms=60_000.0, lease_ms=50_000)


def test_a_broker_that_has_caught_up_is_unfenced_and_leased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ATTEMPT_TIMEOUT_S", 60.0)  # the controller is heard when it describes the quorum

    async def scenario() -> None:
        async with QuorumCluster(tmp_path, options=PATIENT, lasting=True) as cluster:
            await cluster.start()
            broker = HandBroker(cluster.metadata(await cluster.follower()), 1)
            await broker.register()
            assert broker.port.image.brokers[1].fenced
            answer = await broker.until_leased()
            assert answer.controller_epoch == broker.port.image.controller_epoch
            assert not answer.fenced
            info = await broker.port.describe_quorum()
            assert [observer.broker_id for observer in info.observers] == [1]
            assert info.observers[0].last_heartbeat_ms >= 0

    run(scenario)


def test_a_broker_that_falls_silent_is_fenced_and_its_partitions_find_a_leader(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, options=PATIENT, lasting=True) as cluster:
            await cluster.start()
            active = await cluster.active()
            port = cluster.metadata(active)
            brokers = [HandBroker(port, broker_id) for broker_id in (1, 2)]
            for broker in brokers:
                await broker.register()
                await broker.until_leased()
            await port.propose(create_topic_command("t", 1, replication_factor=2))
            silent = brokers[0]
            assert silent.stream is not None
            loop = asyncio.get_running_loop()
            answer = None
            while answer is None or not answer.lease_ms:
                last = loop.time()
                answer = await silent.beat()
            lease_over = last + answer.lease_ms / 1000
            await silent.stream.close()
            async with asyncio.timeout(PATIENT.session_timeout_ms / 2_000):
                while not port.image.brokers[1].fenced:
                    await brokers[1].beat()
                    await asyncio.sleep(0.05)
            assert loop.time() >= lease_over, "fenced under a valid lease"
            topic = next(iter(port.image.topics.values()))
            await eventually(
                lambda: all(p.leader == 2 for p in port.image.topics[topic.topic_id].partitions), "another leader"
            )

    run(scenario)


def test_a_broker_whose_metadata_stands_still_is_fenced_until_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controller, "STANDSTILL_MS", 300.0)

    async def scenario() -> None:
        async with QuorumCluster(tmp_path, lasting=True) as cluster:
            await cluster.start()
            port = cluster.metadata(await cluster.active())
            frozen = HandBroker(port, 1)
            await frozen.register()
            other_id = 1
            while "applies no metadata beyond offset" not in caplog.text:  # or else it was silent, being held up
                frozen.applied_at_most = None
                await frozen.until_leased()
                frozen.applied_at_most = port.image.offset
                other_id += 1
                await port.propose(register_command(other_id))
                while not port.image.brokers[1].fenced:
                    await frozen.beat()
                    await asyncio.sleep(0.05)
            for _ in range(20):
                assert (await frozen.beat()).lease_ms == 0
                await asyncio.sleep(0.01)
            assert port.image.brokers[1].fenced
            frozen.applied_at_most = None
            await frozen.until_leased()

    run(scenario)


def test_a_leader_cut_off_from_its_majority_grants_no_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, options=PATIENT) as cluster:
            await cluster.start()
            active = await cluster.active()
            broker = HandBroker(cluster.metadata(active), 1)
            await broker.register()
            await broker.until_leased()
            while not isinstance(broker.stream, LocalHeartbeats):  # another one has come to lead
                if broker.stream is not None:
                    await broker.stream.close()
                active = await cluster.active()
                broker.port, broker.stream = cluster.metadata(active), None
                await broker.until_leased()
            stream = broker.stream
            for node_id in set(cluster.running) - {active}:
                await cluster.kill(node_id)
            broker.sequence += 1
            request = HeartbeatRequest(
                broker_id=1,
                broker_epoch=broker.broker_epoch,
                sequence=broker.sequence,
                applied_offset=broker.port.image.offset,
            )
            with pytest.raises(NotController):
                await stream.send(request)
                await asyncio.wait_for(stream.receive(), 60)

    run(scenario)


def test_a_registration_anew_ends_the_older_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, options=PATIENT, lasting=True) as cluster:
            await cluster.start()
            port = cluster.metadata(await cluster.follower())
            old, new = HandBroker(port, 1), HandBroker(port, 1)
            await old.register()
            await old.until_leased()
            await new.register(incarnation=2)
            with pytest.raises(StaleBrokerEpoch):
                await old.beat()
            assert (await new.until_leased()).lease_ms > 0

    run(scenario)


def test_a_broker_that_drains_is_fenced_as_soon_as_it_has_let_its_lease_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, options=LONG_LEASE, lasting=True) as cluster:
            await cluster.start()
            port = cluster.metadata(await cluster.active())
            brokers = [HandBroker(port, broker_id) for broker_id in (1, 2)]
            for broker in brokers:
                await broker.register()
                await broker.until_leased()
            await port.propose(create_topic_command("t", 1, replication_factor=2))
            leaving = brokers[0]
            async with asyncio.timeout(60):
                while not (await leaving.beat(wants_shutdown=True)).may_shut_down:
                    await brokers[1].beat()
            topic = next(iter(port.image.topics.values()))
            assert [partition.leader for partition in topic.partitions] == [2, 2]
            assert port.image.brokers[1].in_controlled_shutdown
            loop = asyncio.get_running_loop()
            begun = loop.time()
            async with asyncio.timeout(60):
                while not (await leaving.beat(wants_shutdown=True, released=True)).fenced:  # noqa: ASYNC110 # polls
                    await asyncio.sleep(0.01)
            assert loop.time() - begun < LONG_LEASE.lease_ms / 2_000

    run(scenario)


def test_brokers_keep_their_leases_across_a_change_of_the_controller(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, options=PATIENT) as cluster:
            await cluster.start()
            broker = HandBroker(await cluster.observe(), 1)
            await broker.register()
            before = await broker.until_leased()
            await cluster.kill(await cluster.active())
            after = await broker.until_leased()
            assert after.controller_epoch > before.controller_epoch
            assert not broker.port.image.brokers[1].fenced

    run(scenario)


def test_a_wall_clock_an_hour_off_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, options=PATIENT, skew_ms=-3_600_000, lasting=True) as cluster:
            await cluster.start()
            broker = HandBroker(cluster.metadata(await cluster.follower()), 1)
            await broker.register()
            assert (await broker.until_leased()).lease_ms == PATIENT.lease_ms

    run(scenario)
