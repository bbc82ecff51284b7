"""Planted bugs of the coordinator frame; `tests.simulation.mutations` plants them and says how they are hunted."""

from __future__ import annotations

from tests.simulation.mutations import Mutation, Rewrite

SCHEDULES = 150


def _bug(why: str, *rewrites: Rewrite, story: str | None = None) -> Mutation:
    return Mutation(why, rewrites, schedules=0 if story else SCHEDULES, story=story, kind="groups")


GROUP_MUTATIONS: dict[str, Mutation] = {
    "answered before it is committed": _bug(
        "a response leaves as soon as the leader has appended its records, which may still be lost",
        Rewrite("broker.coordinator.shard:Shard._look", "self._uncommitted[0].end_offset <= high_watermark", "True"),
    ),
    "loaded by halves": _bug(
        "a new coordinator answers after it has replayed only the start of its log",
        Rewrite("broker.coordinator.shard:Shard._run_load", "end_offset = log.log_end_offset", "end_offset = 0"),
    ),
    "a former term answers": _bug(
        "a coordinator does not notice that its term has ended, and answers in the next one with the old state",
        Rewrite("broker.coordinator.shards:Shards._take", "shard.leader_epoch == partition.leader_epoch", "True"),
        Rewrite(
            "broker.coordinator.shard:Shard._is_over",
            "return not self.partition.leads or self.partition.leader_epoch != self.leader_epoch",
            "self.leader_epoch = self.partition.leader_epoch\n    return False",
        ),
        Rewrite("broker.coordinator.shard:Shard.end", "if self.state is State.GONE:", "if True:"),
    ),
    "an append that was refused is forgotten": _bug(
        "a coordinator keeps state whose records the disk refused, and acknowledges it",
        Rewrite(
            "broker.coordinator.shard:Shard._append",
            'self._fail(f"could not be written, and is loaded again: {error}", RELOAD_S)',
            "self._release(effects)",
        ),
    ),
    # Bounds of users
    "any number of groups": _bug(
        "a user with rights to a prefix makes groups until a coordinator has no memory left",
        Rewrite(
            "broker.coordinator.groups.coordinator:GroupCoordinator._decide",
            "if user and not group.exists:",
            "if False:",
        ),
        story="test_a_user_makes_no_more_groups_than_it_may",
    ),
    "groups that are gone count": _bug(
        "groups count for their user after they were deleted, so that it is refused for good",
        Rewrite("broker.coordinator.groups.records:replay", "if not group.exists:", "if False:"),
        story="test_a_group_that_is_deleted_or_expires_makes_room",
    ),
    "groups of offsets only do not count": _bug(
        "a user makes groups without members and without a limit, by committing offsets",
        Rewrite(
            "broker.coordinator.groups.change:Draft._user_of_offsets",
            'return "" if self.head is not None else self._user',
            'return ""',
        ),
        story="test_whatever_makes_a_group_counts",
    ),
}
