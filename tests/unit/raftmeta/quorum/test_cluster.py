"""A quorum of three in one process, over real gRPC: elections, membership, brokers with leases, deaths, watching."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from raftlog.errors import (
    RaftlogError,
    RequestTimedOut,
)
from raftlog.v1.raft_pb2 import JOINING, RaftHello
from raftmeta.quorum import channel, controller, links
from raftmeta.quorum import links as exchange
from raftmeta.quorum.channel import ControllerChannel
from raftmeta.quorum.config import ControllerOptions, Endpoint
from raftmeta.quorum.hello import refusal
from tests.support.metadata import uuid_of
from tests.support.quorum import (
    CLUSTER_ID,
    LASTING_MS,
    WAIT_S,
    HandBroker,
    QuorumCluster,
    create_topic_command,
    eventually,
    free_ports,
    register_command,
    run,
)


def test_three_voters_elect_one_of_them_and_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, lasting=True) as cluster:
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


def test_an_orderly_stop_hands_the_leadership_over_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, lasting=True) as cluster:
            await cluster.start()
            first = await cluster.active()
            await cluster.metadata(first).propose(register_command(1))
            await cluster.metadata(first).step_down(LASTING_MS / 2_000)
            assert await cluster.active() != first, (
                "another controller must be active at once, without an election by time-out"
            )
            second = await cluster.active()
            await cluster.stop(first)
            assert await cluster.active() == second

    run(scenario)


def test_a_leader_does_not_wait_for_a_successor_when_all_others_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, lasting=True) as cluster:
            await cluster.start()
            first = await cluster.active()
            metadata = cluster.metadata(first)
            monkeypatch.setattr(metadata._node, "transfer_leadership", lambda: True)  # and nobody takes it
            stepping_down = asyncio.ensure_future(metadata.step_down(10 * WAIT_S))
            others = set(cluster.running) - {first}
            for node_id in others:
                await asyncio.sleep(0)
                assert not stepping_down.done()
                await cluster.kill(node_id)
            await asyncio.wait_for(stepping_down, WAIT_S)

    run(scenario)


def test_without_a_majority_nothing_is_committed_and_the_error_says_who_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            active = await cluster.active()
            missing = set(cluster.running) - {active}
            for node_id in missing:
                await cluster.kill(node_id)
            await eventually(lambda: not cluster.active_ids(), "the leader steps down")
            metadata = cluster.metadata(active)
            named = [f"controller {node_id} at" for node_id in missing]
            await eventually(lambda: all(name in metadata.waiting_for() for name in named), "it says who is missing")
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
            command = create_topic_command("once", 5)
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


def test_an_observer_follows_whoever_lives_and_never_goes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            await cluster.active()
            observer = await cluster.observe()
            seen: list[int] = []
            observer.subscribe(lambda image, records: seen.append(image.offset))
            await observer.wait_ready()
            await eventually(lambda: observer.waiting_for() == "", "a controller is watched")
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
            while (await observer.describe_quorum()).leader_id != await cluster.active():  # noqa: ASYNC110 # it may change
                await asyncio.sleep(0.05)

    run(scenario)


def test_an_observer_leaves_a_controller_that_stays_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            await cluster.active()
            observer = await cluster.observe()
            await observer.wait_ready()
            await eventually(lambda: observer._watched is not None, "a controller is watched")
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


PATIENT = ControllerOptions(session_timeout_ms=60_000.0)
"""No broker is fenced because the machine is slow."""
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


def test_what_does_not_belong_to_the_quorum_is_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(links, "REFUSED_RETRY_S", 0.15)
    attempts = Counter[int]()

    def counted(mine: RaftHello, theirs: RaftHello) -> RaftlogError | None:
        found = refusal(mine, theirs)
        attempts[theirs.node_id] += found is not None
        return found

    for module in (links, exchange):
        monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 60.0)  # else that is a reason as well
        monkeypatch.setattr(module, "refusal", counted)

    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start(1, 2)
            await cluster.start(3, cluster_id="another")
            await eventually(lambda: "InconsistentClusterId" in caplog.text or "'another'" in caplog.text, "a refusal")
            await eventually(lambda: attempts[3] >= 20 and min(attempts[1], attempts[2]) >= 10, "further attempts")
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


def test_a_second_process_with_an_id_in_use_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (links, exchange):
        monkeypatch.setattr(module, "SILENCE_S", 60.0)  # the first process is taken for alive

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


def test_a_fresh_voter_says_that_the_first_start_needs_every_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start(1)
            await cluster.start(2)
            await eventually(lambda: "controller 3" in cluster.metadata(1).waiting_for(), "it waits for the third one")
            assert "first start of a quorum needs every voter once" in cluster.metadata(1).waiting_for()
            await cluster.start(3)
            await eventually(lambda: bool(cluster.active_ids()), "they elect one of them")
            await eventually(lambda: "first start" not in cluster.metadata(1).waiting_for(), "all have been heard")

    run(scenario)


def test_the_voter_with_the_data_describes_the_quorum_rather_than_one_that_was_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "ATTEMPT_TIMEOUT_S", 60.0)  # every running node is heard

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
            await cluster.start(3)  # 2 is away: 1 cannot join, and there is no leader
            emptied, whole = cluster.metadata(1), cluster.metadata(3)
            await eventually(lambda: emptied._node.voter_state == JOINING, "it finds out that there is a quorum")
            await eventually(lambda: whole._node.peers()[1].connected, "the other one reaches it")
            for asked in (emptied, whole):
                info = await asked.describe_quorum()
                assert (info.leader_id, info.answered_by, info.cluster_id) == (-1, 3, CLUSTER_ID)
                assert {voter.node_id: voter.state for voter in info.voters}[1] == "joining"
                assert {voter.node_id: voter.last_contact_ms for voter in info.voters} == {1: -1, 2: -1, 3: 0}
            assert emptied.quorum_info().cluster_id == CLUSTER_ID

    run(scenario)
