"""Procedures on a stopped controller's directory: what is safe is done, what is not is refused in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from raftlog.errors import CorruptRecordError, InconsistentVoters, InvalidConfig, StorageError
from raftlog.v1.raft_pb2 import JOINING, VOTER
from raftmeta import offline
from raftmeta.disk import OsDisk
from raftmeta.quorum.config import Endpoint
from raftmeta.raft.voters import BEFORE_NAME, PROPERTIES_NAME, MetadataDirectory
from tests.support.quorum import QuorumCluster, eventually, free_ports, register_command, run


@pytest.mark.parametrize(
    ("present", "wanted", "safe"),
    [
        ((1,), (1, 2, 3), True),
        ((1, 2, 3), (1, 2, 3, 4, 5), True),
        ((1, 2, 3), (1, 2), True),
        ((1, 2, 3), (1, 2, 4), True),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4), True),
        ((1, 2, 3), (1, 4, 5), False),
        ((1, 2, 3), (1,), False),
        ((1, 2, 3, 4, 5), (1, 2, 3), False),
        ((1, 2), (1,), True),  # both have everything
        ((1, 2), (1, 2, 3, 4, 5), False),  # 1 and 2 could elect no leader
    ],
)
def test_at_most_one_voter_goes_at_a_time(present: tuple[int, ...], wanted: tuple[int, ...], safe: bool) -> None:
    assert (offline.unsafe_change(present, wanted) is None) is safe


@pytest.mark.parametrize("text", ["", "1,1", "a", "1,b@h:1", "1,2", "1,2,3,4", "1,2,3,4,5,6,7", "-1"])
def test_voters_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfig):
        offline.parse_voters(text)


def test_voters_are_ids_with_or_without_addresses() -> None:
    assert offline.parse_voters("3, 1@host:1,2") == (1, 2, 3)


def test_format_is_done_once_and_gives_a_vote_only_where_nothing_can_be_forgotten(tmp_path: Path) -> None:
    def format_as(name: str, voters: tuple[int, ...], **more: bool) -> int:
        return offline.format_directory(str(tmp_path / name), 1, "c", voters, **more).state

    assert format_as("alone", (1,)) == VOTER
    assert format_as("joins", (1, 2, 3)) == JOINING
    assert format_as("new", (1, 2, 3), new_quorum=True) == VOTER
    before = (tmp_path / "new" / PROPERTIES_NAME).read_bytes()
    with pytest.raises(InvalidConfig, match="already"):
        format_as("new", (1, 2, 3))
    with pytest.raises(InvalidConfig, match="not one of the voters"):
        format_as("other", (2, 3))
    with pytest.raises(InvalidConfig, match=r"cluster\.id is not set.*quorum new-id"):
        offline.format_directory(str(tmp_path / "nameless"), 1, " ", (1,))
    assert (tmp_path / "new" / PROPERTIES_NAME).read_bytes() == before


def test_set_voters_refuses_what_may_lose_data_unless_it_is_forced(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    offline.format_directory(path, 1, "c", (1, 2, 3))
    with pytest.raises(InconsistentVoters, match=r"2, 3.*one at a time.*--force.*docs/quorum.md"):
        offline.set_voters(path, (1,))
    assert offline.describe_directory(path)["voters"] == [1, 2, 3]
    with pytest.raises(InvalidConfig, match="node 1 itself"):
        offline.set_voters(path, (2, 3))
    offline.set_voters(path, (1, 2))
    described = offline.describe_directory(path)
    assert described["voters"] == [1, 2]
    assert described["voter_state"] == "JOINING", "a changed list of voters must not give the node a vote"
    offline.set_voters(path, (1,), force=True)
    assert offline.describe_directory(path)["voter_state"] == "VOTER"


def test_a_directory_in_use_or_missing_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    offline.format_directory(path, 1, "c", (1,))
    disk = OsDisk(path)
    disk.lock()
    try:
        for refused in (
            lambda: offline.describe_directory(path),
            lambda: offline.set_voters(path, (1, 2)),
        ):
            with pytest.raises(StorageError, match="stop it first"):
                refused()
    finally:
        disk.close()
    missing = tmp_path / "missing"
    with pytest.raises(InvalidConfig, match="no directory"):
        offline.describe_directory(str(missing))
    assert not missing.exists()


def test_the_command_line_prints_json_and_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "m")
    place = ["--metadata-dir", path]
    assert offline.main(["format", *place, "--node-id", "1", "--cluster-id", "c", "--voters", "1,2,3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster_id"] == "c"
    assert offline.main(["set-voters", *place, "--voters", "1"]) == 1
    assert "error: " in capsys.readouterr().err
    assert offline.main(["set-voters", *place, "--voters", "1", "--force"]) == 0
    assert "FORCED" in capsys.readouterr().out
    assert offline.main(["describe", *place]) == 0
    assert "log_end_index    1" in capsys.readouterr().out


def test_a_quorum_of_one_grows_to_three_with_copies_and_keeps_its_data(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, 1) as cluster:
            await cluster.start()
            await cluster.metadata(1).wait_ready()
            for number in range(1, 8):
                await cluster.metadata(1).propose(register_command(number))
            await cluster.kill(1)
            first = str(tmp_path / "node-1")
            with pytest.raises(InvalidConfig, match="--copies"):
                offline.set_voters(first, (1, 2, 3))
            offline.set_voters(first, (1, 2, 3), copies=str(tmp_path))
            cluster.endpoints.update(
                {node_id: Endpoint("127.0.0.1", port) for node_id, port in enumerate(free_ports(2), 2)}
            )
            shutil.rmtree(tmp_path / "node-3")  # two of three are enough for the third to join
            await cluster.start()
            for node_id in (1, 2, 3):
                await cluster.metadata(node_id).wait_ready()
                assert set(cluster.metadata(node_id).image.brokers) == set(range(1, 8))
            third = str(tmp_path / "node-3" / PROPERTIES_NAME)
            await eventually(lambda: "VOTER" in Path(third).read_text(), "the third one gets its vote")
            await cluster.kill(await cluster.active())
            await cluster.metadata(await cluster.follower()).propose(register_command(9))

    run(scenario)


def test_the_last_survivor_goes_on_alone_when_it_is_forced_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path) as cluster:
            await cluster.start()
            await cluster.metadata(await cluster.active()).propose(register_command(1))
            for node_id in (1, 2, 3):
                await cluster.metadata(node_id).barrier()
            for node_id in (1, 2, 3):
                await cluster.kill(node_id)
            offline.set_voters(str(tmp_path / "node-2"), (2,), force=True)
            await cluster.start(2, voters={2: cluster.endpoints[2]})
            await cluster.metadata(2).wait_ready()
            assert 1 in cluster.metadata(2).image.brokers
            await cluster.metadata(2).propose(register_command(2))

    run(scenario)


def test_copies_are_refused_where_something_is_and_nothing_changes(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    offline.format_directory(path, 1, "c", (1,))
    (tmp_path / "node-2").mkdir()
    (tmp_path / "node-2" / "precious").write_text("x")
    with pytest.raises(InvalidConfig, match="not empty"):
        offline.set_voters(path, (1, 2, 3), copies=str(tmp_path))
    assert offline.describe_directory(path)["voters"] == [1]


def test_a_formatted_directory_has_a_log_and_starts_as_what_it_was_formatted_for(tmp_path: Path) -> None:
    path = tmp_path / "m"
    offline.format_directory(str(path), 1, "c", (1, 2, 3))
    assert sorted(each.name for each in path.iterdir()) == [".lock", PROPERTIES_NAME, "wal-00000000000000000001"]
    assert offline.describe_directory(str(path))["log_end_index"] == 1
    (path / "wal-00000000000000000001").unlink()
    with pytest.raises(CorruptRecordError, match="is missing"):
        offline.describe_directory(str(path))


def test_a_change_can_be_made_anew_until_the_node_has_started(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    offline.format_directory(path, 1, "c", (1,))
    offline.set_voters(path, (1, 2, 3), copies=str(tmp_path / "first"))
    _, after = offline.set_voters(path, (1, 2, 4), copies=str(tmp_path / "second"))
    assert after.voters == (1, 2, 4)
    copied = offline.describe_directory(str(tmp_path / "second" / "node-4"))
    assert (copied["voters"], copied["node_id"]) == ([1, 2, 4], 4)
    assert not (tmp_path / "second" / "node-4" / BEFORE_NAME).exists()
    _, back = offline.set_voters(path, (1,))
    assert back.voters == (1,)
    offline.set_voters(path, (1, 2, 4), copies=str(tmp_path / "third"))
    MetadataDirectory.open(OsDisk(path), 1, "c", (1, 2, 4)).close()
    with pytest.raises(InconsistentVoters, match="one at a time"):
        offline.set_voters(path, (1,))
    with pytest.raises(InvalidConfig, match="Leave --copies away"):
        offline.set_voters(path, (1, 2, 3), copies=str(tmp_path / "fourth"))


def test_a_forced_change_that_is_taken_back_gives_the_vote_back_too(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    offline.format_directory(path, 1, "c", (1, 2, 3))
    assert offline.set_voters(path, (1,), force=True)[1].state == VOTER
    assert offline.set_voters(path, (1, 2, 3))[1].state == JOINING
