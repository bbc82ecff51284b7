"""What this version of the software can do, and how the cluster agrees on what it does (KIP-584).

A feature has levels. Each broker registers the range of levels that its software knows; the cluster finalizes one
level that all of them know, and finalized levels only rise. What changes the meaning of committed commands has to wait
for a level: all controllers must decide the same, whatever version they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from raftlog.errors import UnsupportedVersion
from raftlog.v1.records_pb2 import FeatureRange, FeatureRecord
from raftmeta.image import FeatureSupport, MetadataImage

METADATA_VERSION = "metadata.version"
BASELINE: Mapping[str, int] = {METADATA_VERSION: 1}
"""Levels that hold before anything is finalized; a broker that does not name such a feature knows just this level."""

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
SUPPORTED: Mapping[str, FeatureSupport] = {METADATA_VERSION: FeatureSupport(METADATA_VERSION, 1, OWN_TOPIC_ID_LEVEL)}
"""What this version knows. Deciding must not look at it: another controller may run another version."""
assert all(SUPPORTED[name].min_level <= level <= SUPPORTED[name].max_level for name, level in BASELINE.items())


def supported_ranges() -> list[FeatureRange]:
    """Return what this version knows, as a broker registers it."""
    return [
        FeatureRange(name=name, min_level=known.min_level, max_level=known.max_level)
        for name, known in sorted(SUPPORTED.items())
    ]


def newest_levels() -> list[FeatureRecord]:
    """Return the levels at which a cluster begins that this version founds: the highest ones."""
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
    """Whether software with these features can work in a cluster with that finalized level; 0: not in use."""
    for known in features:
        if known.name == name:
            return level == 0 or known.min_level <= level <= known.max_level
    return level == BASELINE.get(name, 0)


def check_supported(levels: Mapping[str, int], known: Mapping[str, FeatureSupport] = SUPPORTED) -> None:
    """Check that this version can act on what the cluster has finalized.

    Raises:
        UnsupportedVersion: it cannot; acting on it all the same would make the nodes disagree.
    """
    for name, level in sorted(levels.items()):
        if not supports(known.values(), name, level):
            raise UnsupportedVersion(
                f"the cluster uses {name} at level {level}, which this version does not know; run a newer version here"
            )
