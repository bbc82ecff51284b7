"""A quorum of three in one process, over real gRPC: elections, commits, deaths, watching."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from raftlog.errors import (
    RequestTimedOut,
)
from raftmeta.quorum.channel import ControllerChannel
from tests.support.metadata import uuid_of
from tests.support.quorum import (
    CLUSTER_ID,
    LASTING_MS,
    QuorumCluster,
    create_topic_command,
    eventually,
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


def test_a_dead_leader_is_replaced_and_takes_part_again_when_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            await cluster.metadata(await cluster.active()).propose(register_command(1))
            first = await cluster.active()
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
        async with QuorumCluster(tmp_path, lasting=True) as cluster:
            await cluster.start()
            first = await cluster.active()
            await cluster.metadata(first).propose(register_command(1))
            await cluster.metadata(first).step_down(LASTING_MS / 2_000)
            assert await cluster.active() != first, "an election by time-out takes longer"
            second = await cluster.active()
            await cluster.stop(first)
            assert await cluster.active() == second

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
