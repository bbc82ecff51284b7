"""Planted bugs of the coordinator frame; `tests.simulation.mutations` plants them and says how they are hunted."""

from __future__ import annotations

from tests.simulation.mutations import Mutation, Rewrite

SCHEDULES = 150


def _bug(why: str, *rewrites: Rewrite) -> Mutation:
    return Mutation(why, rewrites, schedules=SCHEDULES, kind="groups")


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
}
