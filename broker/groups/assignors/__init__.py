"""Assignors: who is to have which partition. `BUILT_IN` has those that come with raftlog."""

from __future__ import annotations

from collections.abc import Mapping

from broker.groups.assignors.protocol import Assignor, GroupSpec, MemberSpec
from broker.groups.assignors.range import RangeAssignor
from broker.groups.assignors.round_robin import RoundRobinAssignor
from broker.groups.assignors.sticky import StickyAssignor

__all__ = ["BUILT_IN", "Assignor", "GroupSpec", "MemberSpec", "RangeAssignor", "RoundRobinAssignor", "StickyAssignor"]

BUILT_IN: Mapping[str, Assignor] = {
    assignor.name: assignor for assignor in (StickyAssignor(), RangeAssignor(), RoundRobinAssignor())
}
"""In the order of the default of `group.consumer.assignors`."""
