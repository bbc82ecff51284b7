"""How a broker divides its file descriptors, so that no use of them takes what another needs.

1/2   connections of clients
3/8   active segments, one of each replica
1/16  sealed segments that are open for readers, 512 at most
rest  sealed segments that wait for a flush, checkpoints, the metadata log, connections to other nodes
"""

from __future__ import annotations

import logging
import resource
from typing import Final, NamedTuple

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS: Final = 1 << 20
MAX_SEALED_SEGMENTS: Final = 512


class Descriptors(NamedTuple):
    """How many descriptors each use may have."""

    connections: int
    replicas: int
    sealed_segments: int


def divided(limit: int) -> Descriptors:
    """Return the shares of a limit of open files. Pure."""
    limit = min(limit, MAX_DESCRIPTORS)
    return Descriptors(limit // 2, limit * 3 // 8, max(1, min(limit // 16, MAX_SEALED_SEGMENTS)))


def descriptors() -> Descriptors:
    """Raise this process's limit of open files as far as the system allows, and return its shares."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # it stays as it is
    return divided(MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft)


def warn_of_few_descriptors(found: Descriptors, max_partitions_per_broker: int) -> None:
    """Warn if the broker will refuse topics before max.partitions.per.broker does."""
    if found.replicas < max_partitions_per_broker:
        logger.warning(
            "the limit of open files (ulimit -n) allows this broker %d replicas, fewer than "
            "max.partitions.per.broker=%d: topics beyond that are refused; raise the limit to %d on all brokers, "
            "or lower max.partitions.per.broker",
            found.replicas,
            max_partitions_per_broker,
            -(-max_partitions_per_broker * 8 // 3),
        )
