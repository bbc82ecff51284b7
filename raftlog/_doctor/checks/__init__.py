"""All checks, in the order in which they are told: what does not work first, then what may fail, then the rest."""

from __future__ import annotations

from typing import Final

from raftlog._doctor.checks import (
    balance,
    brokers,
    configs,
    groups,
    machines,
    moves,
    partitions,
    permissions,
    permitted,
    quorum,
    topics,
    transactions,
)
from raftlog._doctor.report import Check

CHECKS: Final[tuple[Check, ...]] = (
    *quorum.CHECKS,
    *brokers.CHECKS,
    *partitions.CHECKS,
    *machines.CHECKS,
    *transactions.CHECKS,
    *groups.CHECKS,
    *topics.CHECKS,
    *moves.CHECKS,
    *balance.CHECKS,
    *configs.CHECKS,
    *permissions.CHECKS,
    *permitted.CHECKS,
)
assert len({check.id for check in CHECKS}) == len(CHECKS), "ids name one check each"
