"""One run with whole brokers that coordinate groups, from a seed."""

from __future__ import annotations

from typing import Any, ClassVar

from broker.coordinator.internal_topics import CONSUMER_OFFSETS
from raftlog._core.membership import MemberState
from raftlog.types import TopicPartition
from tests.simulation.dataplane.clients import Deleter
from tests.simulation.dataplane.group_members import Member, Offsets
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.dataplane.schedule import FIRST_CLIENT, DataSimulation
from tests.simulation.parts import Violation

FIRST_MEMBER = FIRST_CLIENT + 100
GROUPS = ("alpha", "beta")


class GroupSimulation(DataSimulation):
    """Members of two groups share a topic each for themselves; records are not produced but for the probes."""

    OPTIONS: ClassVar[dict[str, type]] = {
        "late_share": float,
        "segment_bytes": int,
        "brokers": int,
        "apart": bool,
        "partitions": int,
        "min_insync_replicas": int,
        "lag_time_max_ms": int,
        "checkpoint_s": float,
        "members": int,
        "least_life_s": float,
        "most_life_s": float,
        "static_share": float,
    }

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.work_topic = ""
        self.offsets = {group_id: Offsets() for group_id in GROUPS}
        self.members: list[Member] = []
        least_s, most_s = self.random.choice(((0.3, 2.0), (1.0, 6.0), (5.0, 30.0)))
        self.member_life_s = (self.chosen("least_life_s", least_s), self.chosen("most_life_s", most_s))
        """How long it is from one misfortune of a member to the next."""

    def is_internal(self, key: PartitionKey) -> bool:
        """Whether a partition belongs to coordinators: clients do not write there, and two batches may be equal."""
        return key[0] == self.id_of(CONSUMER_OFFSETS)

    def start_clients(self) -> None:
        """Create the topics, and begin the members' lives."""
        min_insync_replicas = self.chosen("min_insync_replicas", self.random.choice((1, 2)))
        configs = {"min.insync.replicas": str(min_insync_replicas), "segment.bytes": "5000"}
        self.create_topic(self.random.choice((1, 2)), 3, configs, name=CONSUMER_OFFSETS)
        self.work_topic = self.create_topic(self.chosen("partitions", self.random.choice((1, 3, 5))), 2, {})
        self.deleter = Deleter(self, FIRST_CLIENT)
        number, static_share = FIRST_MEMBER, self.chosen("static_share", 0.3)
        for group_id in GROUPS:
            for _ in range(self.chosen("members", self.random.choice((1, 2, 4)))):
                instance_id = f"static-{number}" if self.random.random() < static_share else ""
                self.members.append(Member(self, number, group_id, instance_id))
                number += 1

    def check_owners(self, member: Member) -> None:
        """A member has acted: no other member may own its partitions.

        Raises:
            Violation: another member does, and both are sure of their sessions.
        """
        mine = member.sure_of()
        for other in self.members:
            if other is member or other.group_id != member.group_id or not mine:
                continue
            for part in mine.keys() & other.sure_of().keys():
                raise Violation(
                    f"{member.group_id}: {part} is owned by two members at once, "
                    f"{member.core.identity.client_id} in epoch {member.core.member_epoch} and "
                    f"{other.core.identity.client_id} in epoch {other.core.member_epoch}"
                )

    def what_is_wrong(self) -> str | None:
        """Return why the cluster, or a group, is not as it should be when nothing is broken."""
        return super().what_is_wrong() or self._what_is_wrong_with_groups()

    def _what_is_wrong_with_groups(self) -> str | None:
        topic = self.invariants.truth.topics[self.id_of(self.work_topic)]
        wanted = {TopicPartition(topic.name, number) for number in range(len(topic.partitions))}
        for group_id in GROUPS:
            members = [member for member in self.members if member.group_id == group_id]
            for member in members:
                if member.core.state is not MemberState.MEMBER or not member.process.alive:
                    return (
                        f"{group_id}: {member.core.identity.client_id} has not joined the group "
                        f"({member.core.state.value})"
                    )
                if member.core.to_release() or member.core.to_take():
                    return f"{group_id}: {member.core.identity.client_id} has partitions still to release, or to take"
            owned = [part for member in members for part in member.core.owned]
            if sorted(owned) != sorted(wanted):
                return f"{group_id}: all partitions must be read, each by one member, but {sorted(owned)} are"
            counts = sorted(len(member.core.owned) for member in members)
            if counts[-1] - counts[0] > 1:
                return f"{group_id} is not balanced: {counts}"
        return None
