"""All checks, in the order of the report: first what does not work, then what may fail, then the rest."""

from __future__ import annotations

from typing import Final

from raftlog._doctor.checks import cluster, groups, machines, permissions, topics
from raftlog._doctor.report import Check

CHECKS: Final[tuple[Check, ...]] = (
    *cluster.QUORUM_CHECKS,
    *cluster.BROKERS_CHECKS,
    *topics.PARTITIONS_CHECKS,
    *machines.CHECKS,
    *groups.TRANSACTIONS_CHECKS,
    *groups.GROUPS_CHECKS,
    *topics.TOPICS_CHECKS,
    *cluster.MOVES_CHECKS,
    *cluster.BALANCE_CHECKS,
    *topics.CONFIGS_CHECKS,
    *permissions.PERMISSIONS_CHECKS,
    *permissions.PERMITTED_CHECKS,
)
assert len({check.id for check in CHECKS}) == len(CHECKS), "every id belongs to one check"
