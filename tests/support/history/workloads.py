"""Operations from the notes of the workloads in `tests/support`, even while these run, or after they failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.support.append_checker import Append, Poll
from tests.support.append_workload import AppendWorkload
from tests.support.durable_writes import DurableWrites
from tests.support.group_checker import Commit, Observation, Span
from tests.support.group_workload import GroupWorkload
from tests.support.history.model import Operation, Outcome
from tests.support.linearizability import NO_ANSWER
from tests.support.linearizability import Operation as Call

_ROW_S = 0.05
"""Answers of a bulk writer that came within this are noted as one operation."""


def of_appends(workload: AppendWorkload) -> Iterator[Operation]:
    """What producers sent and consumers were given."""
    for appender in workload.appenders:
        yield from sends([*appender.appends, *list(appender.unanswered.values())], client=f"producer-{appender.number}")
    for poller in workload.pollers:
        yield from polls(list(poller.polls))


def sends(appends: Iterable[Append], client: str) -> Iterator[Operation]:
    """The records that one producer sent; whether those without an offset are in the log is unknown."""
    for each in appends:
        where = "no answer" if each.offset is None else f"at {each.partition}:{each.offset}"
        outcome: Outcome = "unknown" if each.offset is None else "ok"
        about = f"{each.value.decode(errors='replace')} {where}"
        yield Operation(client, "send", each.invoked_at, each.returned_at, outcome, each.partition, about=about)


def polls(noted: Iterable[Poll], client: str = "consumer") -> Iterator[Operation]:
    """What consumers were given, as far as it is known when."""
    for each in noted:
        if each.invoked_at is None or each.returned_at is None or not each.entries:
            continue
        about = f"{len(each.entries)} records of {each.partition} from {each.entries[0].offset} on"
        name = f"{client}-{each.consumer}"
        yield Operation(name, "poll", each.invoked_at, each.returned_at, "ok", each.partition, about=about)


def of_group(workload: GroupWorkload) -> Iterator[Operation]:
    """The records sent, the records returned to members and committed, and the committed offsets that an observer was
    told."""
    for partition, (sent_at, answered_at) in enumerate(workload.sends):
        yield from rows("sender", partition, sent_at, answered_at)
    noted = workload.notes().values()
    yield from handed(span for each in noted for span in each.spans)
    yield from commits(commit for each in noted for commit in each.commits)
    yield from observations(workload.observations)


def handed(spans: Iterable[Span]) -> Iterator[Operation]:
    """Polls of members: from the call until they were done with what it gave."""
    for span in spans:
        for given in span.given:
            about = f"{len(given.offsets)} records of {span.partition} from {given.offsets[0]} on"
            client = _process(span.member)
            yield Operation(client, "poll", given.asked_at, given.done_at, "ok", span.partition, about=about)


def commits(noted: Iterable[Commit]) -> Iterator[Operation]:
    """Acknowledged commits of members."""
    for each in noted:
        about = f"{each.offset} in epoch {each.member_epoch}"
        client = _process(each.member)
        yield Operation(client, "commit", each.invoked_at, each.returned_at, "ok", each.partition, about=about)


def observations(noted: Iterable[Observation]) -> Iterator[Operation]:
    """The committed offsets that an administrator was told: one operation for the partitions of one answer."""
    by_call: dict[tuple[float, float], dict[int, int]] = {}
    for each in noted:
        by_call.setdefault((each.invoked_at, each.returned_at), {})[each.partition] = each.offset
    for (invoked_at, returned_at), offsets in by_call.items():
        yield Operation("observer", "admin", invoked_at, returned_at, "ok", about=f"committed: {offsets}")


def of_durable_writes(workload: DurableWrites) -> Iterator[Operation]:
    """The acknowledged records of bulk writers, many in one operation, and those without an answer."""
    for writer in workload.writers:
        for partition, (sent_at, answered_at) in enumerate(zip(writer.sent_at, writer.answered_at, strict=True)):
            yield from rows(f"writer-{writer.number}", partition, sent_at, answered_at)


def rows(client: str, partition: int, sent_at: Iterable[float], answered_at: Iterable[float]) -> Iterator[Operation]:
    """Operations out of when records were sent, in that order, and answered, in that order; fewer may be answered."""
    answered = list(answered_at)
    sent = list(sent_at)  # after them: more may be sent meanwhile, and all that was answered was sent
    first = 0
    for index in range(1, len(answered) + 1):
        if index < len(answered) and answered[index] - answered[first] < _ROW_S:
            continue
        count, end_s = index - first, max(answered[index - 1], sent[first])
        yield Operation(client, "send", sent[first], end_s, "ok", partition, about=f"{count} records", count=count)
        first = index
    if len(sent) > len(answered):
        count = len(sent) - len(answered)
        yield Operation(
            client, "send", sent[len(answered)], None, "unknown", partition, about=f"{count} records", count=count
        )


def of_calls(history: Iterable[tuple[str, Call]]) -> Iterator[Operation]:
    """Calls of a metadata workload. Clients make one at a time: the next one ends one that has no answer."""
    next_at: dict[int, float] = {}
    for name, call in sorted(history, key=lambda each: -each[1].invoked_at):
        told = call.answer is not NO_ANSWER and call.returned_at is not None
        end_s = call.returned_at if told else next_at.get(call.client)
        next_at[call.client] = call.invoked_at
        outcome: Outcome = "unknown" if not told else "failed" if call.answer == "refused" else "ok"
        about = f"{name}: {call.request} -> {call.answer}"
        client = f"client-{call.client}" if call.client >= 0 else "reader"
        yield Operation(client, "admin", call.invoked_at, end_s, outcome, about=about)


def _process(member: str) -> str:
    """A member's name without its id, which is another one in each of its sessions."""
    return member.split("/")[0]
