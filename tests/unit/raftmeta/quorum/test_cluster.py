"""A quorum of three in one process, over real gRPC: elections, commits, deaths, refusals, watching, leases."""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from raftlog.errors import (
    InconsistentClusterId,
    InconsistentVoters,
    InvalidConfig,
    NotController,
    RaftlogError,
    RequestTimedOut,
    StaleBrokerEpoch,
)
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse
from raftlog.v1.raft_pb2 import JOINING
from raftlog.v1.records_pb2 import CreateTopicCommand, MetadataCommand
from raftmeta.port import HeartbeatStream, MetadataPort
from raftmeta.quorum import controller
from raftmeta.quorum.channel import ControllerChannel
from raftmeta.quorum.config import ControllerOptions, Endpoint
from raftmeta.quorum.voter_metadata import open_quorum
from tests.support.metadata import uuid_of
from tests.support.quorum import (
    CLUSTER_ID,
    QuorumCluster,
    SystemClock,
    eventually,
    free_ports,
    register_command,
    run,
)


def create_topic(name: str, topic_id: int, replication_factor: int = 1) -> MetadataCommand:
    return MetadataCommand(
        create_topic=CreateTopicCommand(
            name=name, topic_id=uuid_of(topic_id), partitions=2, replication_factor=replication_factor
        )
    )


class Broker:
    """Heartbeats of one broker, by hand."""

    def __init__(self, port: MetadataPort, broker_id: int) -> None:
        self.port = port
        self.broker_id = broker_id
        self.broker_epoch = -1
        self.sequence = 0
        self.stream: HeartbeatStream | None = None
        self.applied_at_most: int | None = None

    async def register(self, incarnation: int = 1) -> None:
        result = await self.port.propose(register_command(self.broker_id, incarnation))
        self.broker_epoch = result.broker_epoch

    async def beat(self, *, wants_shutdown: bool = False, released: bool = False) -> HeartbeatResponse:
        """Send one heartbeat and return its answer; a broken stream is replaced."""
        while True:
            try:
                if self.stream is None:
                    self.stream = await self.port.open_heartbeats()
                self.sequence += 1
                await self.stream.send(
                    HeartbeatRequest(
                        broker_id=self.broker_id,
                        broker_epoch=self.broker_epoch,
                        sequence=self.sequence,
                        applied_offset=min(self.port.image.offset, self.applied_at_most or self.port.image.offset),
                        cluster_id=CLUSTER_ID,
                        wants_shutdown=wants_shutdown,
                        lease_released=released,
                    )
                )
                while (answer := await self.stream.receive()).sequence != self.sequence:
                    pass
            except RaftlogError as error:
                if self.stream is not None:
                    await self.stream.close()
                self.stream = None
                if not error.retriable:
                    raise
                await asyncio.sleep(0.02)
            else:
                return answer

    async def until_leased(self) -> HeartbeatResponse:
        async with asyncio.timeout(10):
            while True:
                answer = await self.beat()
                if answer.lease_ms > 0:
                    return answer
                await asyncio.sleep(0.02)


def test_three_voters_elect_one_of_them_and_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            active = await cluster.active()
            for node_id in cluster.running:
                await cluster.metadata(node_id).wait_ready()
                assert cluster.metadata(node_id).waiting_for() == ""
            epochs = set()
            for node_id in cluster.running:
                await cluster.metadata(node_id).propose(register_command(node_id))
                epochs.add(cluster.metadata(node_id).image.controller_epoch)
            await eventually(
                lambda: all(len(node.metadata.image.brokers) == 3 for node in cluster.running.values()), "replication"
            )
            images = [node.metadata.image for node in cluster.running.values()]
            assert images[0] == images[1] == images[2]
            assert images[0].cluster_id == CLUSTER_ID
            assert images[0].controller_id == active
            assert cluster.active_ids() == [active]
            assert epochs == {images[0].controller_epoch}

    run(scenario)


def test_a_dead_leader_is_replaced_and_takes_part_again_when_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            first = await cluster.active()
            await cluster.metadata(first).propose(register_command(1))
            before = cluster.metadata(first).image.controller_epoch
            await cluster.kill(first)
            second = await cluster.active()
            assert second != first
            follower = await cluster.follower()
            await cluster.metadata(follower).propose(register_command(2))
            assert cluster.metadata(follower).image.controller_epoch > before
            await cluster.start(first)
            await cluster.metadata(first).wait_ready()
            assert set(cluster.metadata(first).image.brokers) == {1, 2}
            await cluster.kill(second)
            await cluster.active()
            await cluster.metadata(first).propose(register_command(3))
            assert set(cluster.metadata(first).image.brokers) == {1, 2, 3}
            assert cluster.fatal == []

    run(scenario)


def test_an_orderly_stop_hands_the_leadership_over_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            first = await cluster.active()
            await cluster.metadata(first).propose(register_command(1))
            loop = asyncio.get_running_loop()
            begun = loop.time()
            await cluster.stop(first)
            assert await cluster.active() != first
            assert loop.time() - begun < 0.5, "an election by time-out takes longer"

    run(scenario)


def test_without_a_majority_nothing_is_committed_and_the_error_says_who_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            active = await cluster.active()
            for node_id in set(cluster.running) - {active}:
                await cluster.kill(node_id)
            await eventually(lambda: not cluster.active_ids(), "the leader steps down")
            metadata = cluster.metadata(active)
            with pytest.raises(RequestTimedOut, match="controller"):
                await metadata._channel.propose(register_command(7), timeout_s=0.5)
            assert 7 not in metadata.image.brokers
            assert "127.0.0.1" in metadata.waiting_for()
            info = await metadata.describe_quorum()
            assert (info.leader_id, info.answered_by) == (-1, active)
            assert "first start" not in metadata.waiting_for()
            assert sorted(voter.state for voter in info.voters) == ["follower", "unreachable", "unreachable"]

    run(scenario)


def test_a_retry_on_another_controller_counts_once_and_gets_the_first_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            active = await cluster.active()
            await cluster.metadata(active).propose(register_command(1))
            client = uuid_of(77)

            def channel() -> ControllerChannel:
                return ControllerChannel(9, cluster.endpoints, lambda: CLUSTER_ID, client_id=client)

            before, after = channel(), channel()
            command = create_topic("once", 5)
            command.create_topic.replication_factor = 1
            first = await before.propose(register_command(4))
            await cluster.kill(active)
            again = await after.propose(register_command(4))  # the same client and sequence, 0
            assert again == first
            follower = await cluster.follower()
            await cluster.metadata(follower).barrier()
            assert cluster.metadata(follower).image.brokers[4].broker_epoch == first.broker_epoch
            await before.close()
            await after.close()

    run(scenario)


def test_a_barrier_on_any_node_covers_what_was_acknowledged_anywhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            active = await cluster.active()
            others = sorted(set(cluster.running) - {active})
            for number in range(1, 30):
                result = await cluster.metadata(others[0]).propose(register_command(number))
                assert await cluster.metadata(others[1]).barrier() >= result.offset
                assert number in cluster.metadata(others[1]).image.brokers

    run(scenario)


def test_an_observer_follows_whoever_lives_and_never_goes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            await cluster.active()
            observer = await cluster.observe()
            seen: list[int] = []
            observer.subscribe(lambda image, records: seen.append(image.offset))
            await observer.wait_ready()
            assert observer.waiting_for() == ""
            number = 0
            for _ in range(3):
                for _ in range(5):
                    number += 1
                    await observer.propose(register_command(number))
                    assert number in observer.image.brokers
                victim = await cluster.active()
                await cluster.kill(victim)
                await cluster.active()
                await cluster.start(victim)
            await observer.barrier()
            assert set(observer.image.brokers) == set(range(1, number + 1))
            assert seen == sorted(set(seen))
            info = await observer.describe_quorum()
            assert info.leader_id == await cluster.active()

    run(scenario)


def test_an_observer_leaves_a_controller_that_stays_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            await cluster.active()
            observer = await cluster.observe()
            await observer.wait_ready()
            watched = observer._watched
            assert watched is not None
            # The watched controller is heard by the observer, and hears none of the others any more.
            feed = cluster.metadata(watched)._feed
            feed.publish = lambda image, change: None  # type: ignore[method-assign] # what a cut-off node amounts to
            feed.reset = lambda image: None  # type: ignore[method-assign] # as above
            await observer.propose(register_command(5))
            assert 5 in observer.image.brokers
            assert observer._watched != watched
            assert "it stays at offset" in caplog.text

    run(scenario)


def test_what_does_not_belong_to_the_quorum_is_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start(1, 2)
            await cluster.start(3, cluster_id="another")
            await eventually(lambda: "InconsistentClusterId" in caplog.text or "'another'" in caplog.text, "a refusal")
            await asyncio.sleep(2.0)
            assert cluster.metadata(3).image.offset == 0
            assert "'another'" in cluster.metadata(3).waiting_for()
            refusals = [r for r in caplog.records if r.levelno >= logging.ERROR and "'another'" in r.getMessage()]
            # Two nodes see the third one's streams and it theirs: one line for each of them, not for each attempt.
            assert 2 <= len(refusals) <= 8, [r.getMessage() for r in refusals]

    run(scenario)


def test_voters_that_name_others_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start(1)
            stranger = Endpoint("127.0.0.1", free_ports(1)[0])
            await cluster.start(2, voters={1: cluster.endpoints[1], 2: cluster.endpoints[2], 4: stranger})
            await eventually(lambda: "set-voters" in caplog.text, "a refusal that names the command")
            assert "[1, 2, 4]" in caplog.text
            assert cluster.active_ids() == []

    run(scenario)


def test_a_second_process_with_an_id_in_use_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            active = await cluster.active()
            follower = await cluster.follower()
            elsewhere = Endpoint("127.0.0.1", free_ports(1)[0])
            config = replace(
                cluster.config(follower),
                directory=str(tmp_path / "copy"),
                voters={**cluster.endpoints, follower: elsewhere},
            )
            twin = await cluster.start_one(config, elsewhere)
            await eventually(lambda: f"another process with node.id {follower}" in caplog.text, "a refusal")
            assert twin.metadata.image.offset == 0
            await cluster.metadata(active).propose(register_command(1))
            assert twin.server is not None
            await twin.server.stop(None)
            await twin.metadata.close(hand_over=False)

    run(scenario)


def test_a_directory_of_another_node_or_version_or_in_use_does_not_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, 1) as cluster:
            config = cluster.config(1)
            await cluster.start()
            await cluster.active()

            async def refused(error: type[RaftlogError], words: str, **changes: object) -> None:
                with pytest.raises(error, match=words):
                    await open_quorum(
                        replace(config, **changes),  # type: ignore[arg-type] # names and values of its fields
                        cluster.executor,
                        SystemClock(),
                        lambda error: None,
                    )

            await refused(RaftlogError, "in use")
            await cluster.kill(1)
            await refused(InvalidConfig, "belongs to node 1", node_id=2)
            await refused(InconsistentClusterId, "says test-cluster", cluster_id="other")
            await refused(
                InconsistentVoters, "set-voters", voters={1: Endpoint("127.0.0.1", 1), 2: Endpoint("127.0.0.1", 2)}
            )
            old = tmp_path / "old"
            old.mkdir()
            (old / "format").write_text("1\n")
            (old / "journal-00000000000000000001").write_bytes(b"x")
            await refused(InvalidConfig, "without a quorum.*empty directory", directory=str(old))
            await cluster.start()  # all that changed nothing
            await cluster.active()

    run(scenario)


def test_one_voter_needs_no_network_and_keeps_what_it_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, 1) as cluster:
            await cluster.start()
            await cluster.metadata(1).wait_ready()
            for number in range(1, 20):
                await cluster.metadata(1).propose(register_command(number))
            image = cluster.metadata(1).image
            await cluster.kill(1)
            await cluster.start()
            await cluster.metadata(1).wait_ready()
            again = cluster.metadata(1).image
            assert again.brokers == image.brokers
            assert again.controller_epoch > image.controller_epoch
            assert again.offset > image.offset

    run(scenario)


def test_a_wall_clock_an_hour_off_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, skew_ms=-3_600_000) as cluster:
            await cluster.start()
            broker = Broker(cluster.metadata(await cluster.follower()), 1)
            await broker.register()
            assert (await broker.until_leased()).lease_ms == ControllerOptions().lease_ms

    run(scenario)


# Leases


def test_a_broker_that_has_caught_up_is_unfenced_and_leased(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            broker = Broker(cluster.metadata(await cluster.follower()), 1)
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
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            active = await cluster.active()
            port = cluster.metadata(active)
            brokers = [Broker(port, broker_id) for broker_id in (1, 2)]
            for broker in brokers:
                await broker.register()
                await broker.until_leased()
            await port.propose(create_topic("t", 1, replication_factor=2))
            silent = brokers[0]
            assert silent.stream is not None
            loop = asyncio.get_running_loop()
            last = loop.time()
            await silent.beat()
            lease_over = last + ControllerOptions().lease_ms / 1000
            await silent.stream.close()
            async with asyncio.timeout(5):
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
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            port = cluster.metadata(await cluster.active())
            frozen = Broker(port, 1)
            await frozen.register()
            await frozen.until_leased()
            frozen.applied_at_most = port.image.offset
            await port.propose(create_topic("t", 1))
            async with asyncio.timeout(10):
                while not port.image.brokers[1].fenced:
                    await frozen.beat()
                    await asyncio.sleep(0.05)
                for _ in range(20):
                    assert (await frozen.beat()).lease_ms == 0
                    await asyncio.sleep(0.01)
            assert port.image.brokers[1].fenced
            assert "applies no metadata beyond offset" in caplog.text
            frozen.applied_at_most = None
            await frozen.until_leased()

    run(scenario)


def test_a_fresh_voter_says_that_the_first_start_needs_every_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start(1)
            await cluster.start(2)
            await eventually(lambda: "controller 3" in cluster.metadata(1).waiting_for(), "it waits for the third one")
            assert "first start of a quorum needs every voter once" in cluster.metadata(1).waiting_for()
            await cluster.start(3)
            await eventually(lambda: bool(cluster.active_ids()), "they elect one of them")
            assert "first start" not in cluster.metadata(1).waiting_for()

    run(scenario)


def test_the_voter_with_the_data_describes_the_quorum_rather_than_one_that_was_emptied(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            await cluster.metadata(await cluster.active()).propose(register_command(7))
            for node_id in (1, 2, 3):
                await cluster.metadata(node_id).barrier()
            for node_id in (1, 2, 3):
                await cluster.kill(node_id)
            shutil.rmtree(tmp_path / "node-1")
            await cluster.start(1)
            await cluster.start(3)  # 2 is away: 1 cannot join, and nobody leads
            emptied, whole = cluster.metadata(1), cluster.metadata(3)
            await eventually(lambda: emptied._node.voter_state == JOINING, "it finds out that there is a quorum")
            for asked in (emptied, whole):
                info = await asked.describe_quorum()
                assert (info.leader_id, info.answered_by, info.cluster_id) == (-1, 3, CLUSTER_ID)
                assert {voter.node_id: voter.state for voter in info.voters}[1] == "joining"
                assert {voter.node_id: voter.last_contact_ms for voter in info.voters} == {1: -1, 2: -1, 3: 0}
            assert emptied.quorum_info().cluster_id == CLUSTER_ID

    run(scenario)


def test_a_leader_cut_off_from_its_majority_grants_no_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            active = await cluster.active()
            broker = Broker(cluster.metadata(active), 1)
            await broker.register()
            await broker.until_leased()
            for node_id in set(cluster.running) - {active}:
                await cluster.kill(node_id)
            stream = broker.stream
            assert stream is not None
            broker.sequence += 1
            await stream.send(
                HeartbeatRequest(
                    broker_id=1,
                    broker_epoch=broker.broker_epoch,
                    sequence=broker.sequence,
                    applied_offset=broker.port.image.offset,
                )
            )
            with pytest.raises(NotController):
                await asyncio.wait_for(stream.receive(), 5)

    run(scenario)


def test_a_registration_anew_ends_the_older_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            port = cluster.metadata(await cluster.follower())
            old, new = Broker(port, 1), Broker(port, 1)
            await old.register()
            await old.until_leased()
            await new.register(incarnation=2)
            with pytest.raises(StaleBrokerEpoch):
                await old.beat()
            assert (await new.until_leased()).lease_ms > 0

    run(scenario)


def test_a_broker_that_drains_is_fenced_as_soon_as_it_has_let_its_lease_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            port = cluster.metadata(await cluster.active())
            brokers = [Broker(port, broker_id) for broker_id in (1, 2)]
            for broker in brokers:
                await broker.register()
                await broker.until_leased()
            await port.propose(create_topic("t", 1, replication_factor=2))
            leaving = brokers[0]
            async with asyncio.timeout(5):
                while not (await leaving.beat(wants_shutdown=True)).may_shut_down:
                    await brokers[1].beat()
            topic = next(iter(port.image.topics.values()))
            assert [partition.leader for partition in topic.partitions] == [2, 2]
            assert port.image.brokers[1].in_controlled_shutdown
            loop = asyncio.get_running_loop()
            begun = loop.time()
            async with asyncio.timeout(5):
                while not (await leaving.beat(wants_shutdown=True, released=True)).fenced:  # noqa: ASYNC110 # polls
                    await asyncio.sleep(0.01)
            assert loop.time() - begun < 0.5

    run(scenario)


def test_brokers_keep_their_leases_across_a_change_of_the_controller(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            first = await cluster.active()
            follower = await cluster.follower()
            broker = Broker(cluster.metadata(follower), 1)
            await broker.register()
            before = await broker.until_leased()
            await cluster.kill(first)
            after = await broker.until_leased()
            assert after.controller_epoch > before.controller_epoch
            assert not broker.port.image.brokers[1].fenced

    run(scenario)
