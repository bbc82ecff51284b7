"""At which feature levels a cluster begins, and what a controller refuses below them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftlog.errors import UnsupportedVersion
from raftlog.v1.records_pb2 import AlterBrokerCommand, MetadataCommand, UpdateFeatureCommand
from raftmeta.features import METADATA_VERSION, SUPPORTED
from raftmeta.quorum import controller
from tests.support.quorum import QuorumCluster, register_command, run

DRAIN = MetadataCommand(alter_broker=AlterBrokerCommand(broker_id=1, drained=True))


def test_a_new_cluster_begins_at_the_highest_levels_and_a_later_controller_leaves_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, 1) as cluster:
            await cluster.start()
            await cluster.metadata(1).wait_ready()
            newest = {METADATA_VERSION: SUPPORTED[METADATA_VERSION].max_level}
            assert cluster.metadata(1).image.features == newest
            offset = cluster.metadata(1).image.offset
            await cluster.kill(1)
            await cluster.start()
            await cluster.metadata(1).wait_ready()
            assert cluster.metadata(1).image.features == newest
            records = [r for change in cluster.metadata(1).changes_since(offset) or () for r in change.records]
            assert [record.WhichOneof("record") for record in records] == ["controller"]

    run(scenario)


def test_what_older_controllers_do_not_know_is_not_even_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would stop at it; so the level has to say first that there are none."""
    monkeypatch.setattr(controller, "newest_levels", list)

    async def scenario() -> None:
        async with QuorumCluster(tmp_path, 1) as cluster:
            await cluster.start()
            metadata = cluster.metadata(1)
            await metadata.wait_ready()
            assert metadata.image.features == {}
            await metadata.propose(register_command(1))
            end = metadata.quorum_info().log_end_index
            with pytest.raises(UnsupportedVersion, match="features upgrade"):
                await metadata.propose(DRAIN)
            assert metadata.quorum_info().log_end_index == end
            raised = UpdateFeatureCommand(name=METADATA_VERSION, level=2)
            await metadata.propose(MetadataCommand(update_feature=raised))
            await metadata.propose(DRAIN)
            assert metadata.image.brokers[1].drained

    run(scenario)
