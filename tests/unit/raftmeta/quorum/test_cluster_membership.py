"""Who belongs to a quorum, over real gRPC: what is refused and with which reason, and what a fresh voter waits for."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from raftlog.errors import (
    InconsistentClusterId,
    InconsistentVoters,
    InvalidConfig,
    RaftlogError,
)
from raftlog.v1.raft_pb2 import JOINING, RaftHello
from raftmeta.quorum import channel, exchange, links
from raftmeta.quorum.config import Endpoint
from raftmeta.quorum.hello import refusal
from raftmeta.quorum.voter_metadata import open_quorum
from tests.support.quorum import (
    CLUSTER_ID,
    QuorumCluster,
    SystemClock,
    eventually,
    free_ports,
    register_command,
    run,
)


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
    monkeypatch.setattr(channel, "ATTEMPT_TIMEOUT_S", 60.0)  # everyone who runs is heard

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
            await eventually(lambda: whole._node.peers()[1].connected, "the other one reaches it")
            for asked in (emptied, whole):
                info = await asked.describe_quorum()
                assert (info.leader_id, info.answered_by, info.cluster_id) == (-1, 3, CLUSTER_ID)
                assert {voter.node_id: voter.state for voter in info.voters}[1] == "joining"
                assert {voter.node_id: voter.last_contact_ms for voter in info.voters} == {1: -1, 2: -1, 3: 0}
            assert emptied.quorum_info().cluster_id == CLUSTER_ID

    run(scenario)
