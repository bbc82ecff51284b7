"""Features: what a version of the software supports, and the levels that the cluster has agreed on (KIP-584).

A feature has levels. Each broker registers the range of levels that it supports; the cluster finalizes one level that
all of them support, and finalized levels only rise. A change of the meaning of committed commands needs a new level,
because controllers of different versions must decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from raftlog.errors import UnsupportedVersion
from raftlog.v1.records_pb2 import FeatureRange, FeatureRecord
from raftmeta.image import FeatureSupport, MetadataImage

METADATA_VERSION = "metadata.version"
BASELINE: Mapping[str, int] = {METADATA_VERSION: 1}
"""Levels before any is finalized; a broker that does not register such a feature supports just this level."""

DRAINING: Final = "cordoning and draining of brokers"
DRAIN_LEVEL: Final = 2
"""Of metadata.version: brokers are cordoned and drained (`AlterBrokerCommand`, three fields of `BrokerRecord`)."""
REPLACED_DISK_LEVEL: Final = 2
"""Of metadata.version: brokers register all their log directories, and replicas that lost their log are marked as such
(fields of `RegisterBrokerCommand`, `BrokerRecord` and `PartitionRecord`)."""
SECURITY: Final = "users and permissions"
SECURITY_LEVEL: Final = 2
"""Of metadata.version: credentials and ACLs are kept (`AlterUsersCommand`, `AlterAclsCommand` and their records)."""
OWN_TOPIC_ID_LEVEL: Final = 3
"""Of metadata.version: a topic's id depends on where it was created (`TopicRecord.requested_id`)."""
SYNCED_LEVEL: Final = 4
"""Of metadata.version: a broker that returns from an unclean stop keeps the replicas that had fsynced everything
(`RegisterBrokerCommand.synced_broker_epoch`, `BrokerRecord.unsynced_topic_ids`)."""
FULL_STORAGE: Final = "the report of a full disk"
FULL_STORAGE_LEVEL: Final = 4
"""Of metadata.version: a broker without space hands its leaderships over (`AlterBrokerCommand.storage_full`)."""
KAFKA_LISTENER_LEVEL: Final = 4
"""Of metadata.version: brokers register the address of their listener for Kafka clients (fields of
`RegisterBrokerCommand` and `BrokerRecord`)."""
PRODUCER_OWNERS_LEVEL: Final = 5
"""Of metadata.version: producer ids are bound to their owners (`ProducerIdKeyRecord`), and leaders verify transactions
with their coordinators (docs/adr/0026). Older brokers cannot verify; older clients do not name their transactions."""
QUOTAS: Final = "a quota"
QUOTAS_LEVEL: Final = 6
"""Of metadata.version: quotas are kept (`AlterQuotasCommand`, `QuotaRecord`)."""
ACLS_OF_NETWORKS: Final = "an ACL for a network"
ACLS_OF_NETWORKS_LEVEL: Final = 7
"""Of metadata.version: the host of an ACL may be a network. An older broker would never apply such an ACL, so that a
denial would deny nothing there."""
ROLES: Final = "a role"
ROLES_LEVEL: Final = 8
"""Of metadata.version: roles are kept (`AlterRolesCommand`, `RoleRecord`). An older broker would not apply their
permissions, nor their denials."""
LIVE_GROUPS_LEVEL: Final = 8
"""Of metadata.version: live groups move from the classic protocol to KIP-848 (docs/adr/0039). An older broker that
takes such a group over refuses its classic members for good."""
SPREAD_LEADERS_LEVEL: Final = 9
"""Of metadata.version: the preferred leaders of a topic are spread over the brokers. Below, a new partition goes to the
broker that leads fewest at that moment, so all go to one that has just come back."""
ALTER_PARTITIONS: Final = "a command with the ISR changes of many partitions"
ALTER_PARTITIONS_LEVEL: Final = 10
"""Of metadata.version: a leader proposes the ISR changes of many partitions in one command (`AlterPartitionsCommand`).
Below, each change is a command of its own: an older controller stops at a kind of command that it does not know."""
TOPIC_USERS_LEVEL: Final = 11
"""Of metadata.version: a topic records the user that created it (`TopicRecord.user`). An older controller would lose
it with its next snapshot."""
SUPPORTED: Mapping[str, FeatureSupport] = {METADATA_VERSION: FeatureSupport(METADATA_VERSION, 1, TOPIC_USERS_LEVEL)}
"""The levels that this version supports. Decisions must not depend on it: controllers may differ in version."""
assert all(SUPPORTED[name].min_level <= level <= SUPPORTED[name].max_level for name, level in BASELINE.items())


def supported_ranges() -> list[FeatureRange]:
    """Return the levels that this version supports, as a broker registers them."""
    return [
        FeatureRange(name=name, min_level=known.min_level, max_level=known.max_level)
        for name, known in sorted(SUPPORTED.items())
    ]


def newest_levels() -> list[FeatureRecord]:
    """Return the levels of a new cluster: the highest that this version supports."""
    return [FeatureRecord(name=name, level=known.max_level) for name, known in sorted(SUPPORTED.items())]


def metadata_version(image: MetadataImage) -> int:
    """Return the level that the cluster has agreed on."""
    return image.features.get(METADATA_VERSION, BASELINE[METADATA_VERSION])


def check_metadata_version(image: MetadataImage, level: int, what: str) -> None:
    """Check that the cluster is at that metadata.version or above.

    Raises:
        UnsupportedVersion: it is not; some of its controllers may not know what is asked for.
    """
    present = metadata_version(image)
    if present < level:
        raise UnsupportedVersion(
            f"{what} needs {METADATA_VERSION}={level}, the cluster is at {present}; when all nodes run a version that "
            "knows it: raftlog cluster features upgrade"
        )


def supports(features: Iterable[FeatureSupport], name: str, level: int) -> bool:
    """Whether software that supports these levels can run in a cluster with this finalized level; 0: not in use."""
    for known in features:
        if known.name == name:
            return level == 0 or known.min_level <= level <= known.max_level
    return level == BASELINE.get(name, 0)


def check_supported(levels: Mapping[str, int], known: Mapping[str, FeatureSupport] = SUPPORTED) -> None:
    """Check that this version supports the finalized levels.

    Raises:
        UnsupportedVersion: it does not; the nodes would disagree.
    """
    for name, level in sorted(levels.items()):
        if not supports(known.values(), name, level):
            raise UnsupportedVersion(
                f"the cluster uses {name} at level {level}, which this version does not know; run a newer version here"
            )
