"""What a member of a group may: READ of the group, for each request of its session; READ of the topics whose offsets it
commits, DESCRIBE of those that it subscribes to.

As Kafka's protocol of members does it (KIP-848): a subscription that names a topic which the member may not describe is
refused, with TOPIC_AUTHORIZATION_FAILED, whether the topic exists or not; of one that was matched by a pattern such
topics are left out, since nobody has asked for them by name. A commit is answered for each partition. Permissions that
go while a session stands are missed with its next request; a topic that may not be described any more stays assigned
until the member subscribes anew, and is refused by whoever leads it when it is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from typing import Final

from broker.groups.checks import check_topic_count
from broker.security.caller import Caller
from broker.security.decisions import Decisions, allowed_of
from broker.security.rules import NameOf
from raftlog.errors import InternalError, TopicAuthorizationFailed, to_wire
from raftlog.v1.common_pb2 import Error
from raftlog.v1.group_pb2 import (
    CommitOffset,
    CommitOffsetResult,
    CommitOffsetsRequest,
    CommitOffsetsResponse,
    CommittedOffset,
    FetchOffsetsRequest,
    FetchOffsetsResponse,
    GroupDescription,
    ListedGroup,
    SessionCommit,
    SessionCommitResult,
    Subscription,
    TopicPartitions,
)
from raftlog.v1.security_pb2 import Acl
from raftmeta.acls import CLUSTER_NAME

AT_A_TIME: Final = 500
"""Decisions between which the event loop is free."""


class MemberPermissions:
    """Those of one session. Made with `MemberPermissions.of`; None where there is no authorizer."""

    def __init__(self, groups: Decisions, reads: Decisions, describes: Decisions, name_of: NameOf) -> None:
        self._groups = groups
        self._reads = reads
        self._describes = describes
        self._name_of = name_of
        self._refused: dict[int, Sequence[Error | None]] = {}
        """Of commits under way, by correlation id: why a partition was left out, None for one that was not."""

    @classmethod
    def of(cls, who: Caller, name_of: NameOf) -> MemberPermissions | None:
        """Return what one caller may as a member; None: everything."""
        groups = Decisions.of(who, Acl.READ, Acl.GROUP)
        reads, describes = Decisions.of(who, Acl.READ, Acl.TOPIC), Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC)
        if groups is None or reads is None or describes is None:
            return None
        return cls(groups, reads, describes, name_of)

    def check_group(self, group_id: str) -> None:
        """Check that the caller may be in this group.

        Raises:
            GroupAuthorizationFailed: no.
        """
        self._groups.check(group_id)

    async def check_subscription(self, subscription: Subscription) -> None:
        """Check what is subscribed to, and take out what a pattern has matched and must not be seen.

        Raises:
            InvalidRequestError: it is more than anybody may subscribe to.
            TopicAuthorizationFailed: a topic that is named may not be described.
        """
        check_topic_count(subscription)
        seen = []
        for number, topic in enumerate(subscription.topics, 1):
            if not subscription.pattern:
                self._describes.check(topic)
            elif self._describes.allow(topic):
                seen.append(topic)
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)
        if subscription.pattern:
            del subscription.topics[:]
            subscription.topics.extend(seen)

    async def admit(self, commit: SessionCommit) -> SessionCommitResult | None:
        """Take out of a commit what may not be committed; return the answer if that is all of it."""
        errors = await _refusals(commit.offsets, self._reads, self._name_of)
        if not any(errors):
            return None
        allowed = [offset for offset, error in zip(commit.offsets, errors, strict=True) if error is None]
        if not allowed:
            results = [CommitOffsetResult(error=error) for error in errors]
            return SessionCommitResult(correlation_id=commit.correlation_id, results=results)
        self._refused[commit.correlation_id] = errors
        del commit.offsets[:]
        commit.offsets.extend(allowed)
        return None

    def complete(self, result: SessionCommitResult) -> None:
        """Put into the answer of a commit what was taken out of it."""
        errors = self._refused.pop(result.correlation_id, None)
        if errors is not None:
            _complete(result, errors)


async def _refusals(
    parts: Iterable[CommitOffset | TopicPartitions], topics: Decisions, name_of: NameOf
) -> list[Error | None]:
    """Return why each part is refused, None for those that are not; also for what there is not: the group says so."""
    errors: list[Error | None] = []
    for number, part in enumerate(parts, 1):
        name = name_of(part.topic_id) if part.topic_id else part.topic
        errors.append(None if not name or topics.allow(name) else to_wire(topics.refusal(name)))
        if number % AT_A_TIME == 0:
            await asyncio.sleep(0)
    return errors


def _complete(answer: SessionCommitResult | CommitOffsetsResponse, errors: Sequence[Error | None]) -> None:
    """Put refusals into the results of those that were not refused, in the place of each.

    An error of all stays one. An answer that does not fit becomes one: it was not meant for this.
    """
    if answer.HasField("error"):
        return
    results, asked = list(answer.results), errors.count(None)
    del answer.results[:]
    if len(results) != asked:
        answer.error.CopyFrom(_misfit(len(results), asked))
        return
    answered = iter(results)
    answer.results.extend(next(answered) if error is None else CommitOffsetResult(error=error) for error in errors)


def _misfit(answered: int, asked: int) -> Error:
    return to_wire(InternalError(f"the group's coordinator answered for {answered} of {asked} partitions"))


# Calls: what is allowed of them is asked for, and the refusals are put in between


async def committed(
    request: CommitOffsetsRequest,
    who: Caller,
    name_of: NameOf,
    commit: Callable[[CommitOffsetsRequest], Awaitable[CommitOffsetsResponse]],
) -> CommitOffsetsResponse:
    """Have committed what may be read, and answer for each partition."""
    topics = Decisions.of(who, Acl.READ, Acl.TOPIC)
    errors = [] if topics is None else await _refusals(request.offsets, topics, name_of)
    if not any(errors):
        return await commit(request)
    allowed = [offset for offset, error in zip(request.offsets, errors, strict=True) if error is None]
    response = CommitOffsetsResponse()
    if allowed:
        rest = CommitOffsetsRequest()
        rest.CopyFrom(request)
        del rest.offsets[:]
        rest.offsets.extend(allowed)
        response = await commit(rest)
    _complete(response, errors)
    return response


async def fetched(
    request: FetchOffsetsRequest,
    who: Caller,
    name_of: NameOf,
    fetch: Callable[[FetchOffsetsRequest], Awaitable[FetchOffsetsResponse]],
) -> FetchOffsetsResponse:
    """Have fetched what may be described, and answer for each partition that is named; with `all` leave out others."""
    topics = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC)
    if topics is None:
        return await fetch(request)
    errors = [] if request.all else await _refusals(request.partitions, topics, name_of)
    if not any(errors):
        response = await fetch(request)
        if request.all:
            leave_out_offsets(response, who)
        return response
    response = FetchOffsetsResponse()
    if not all(errors):
        rest = FetchOffsetsRequest()
        rest.CopyFrom(request)
        del rest.partitions[:]
        rest.partitions.extend(part for part, error in zip(request.partitions, errors, strict=True) if error is None)
        response = await fetch(rest)
        if response.HasField("error"):
            return response
    asked = sum(len(part.partitions) for part, error in zip(request.partitions, errors, strict=True) if error is None)
    if len(response.offsets) != asked:
        return FetchOffsetsResponse(error=_misfit(len(response.offsets), asked))
    answered = iter(list(response.offsets))
    del response.offsets[:]
    for part, error in zip(request.partitions, errors, strict=True):
        for number in part.partitions:
            refused = CommittedOffset(
                topic_id=part.topic_id, topic=part.topic, partition=number, error=error, offset=-1, leader_epoch=-1
            )
            response.offsets.append(next(answered) if error is None else refused)
    return response


# What answers may show


async def shown_groups(groups: list[ListedGroup], who: Caller) -> list[ListedGroup]:
    """Return the groups that a caller may see in a list: all with DESCRIBE of the cluster, else each by itself."""
    if who.may(Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME, log=False):
        return groups
    return await allowed_of(Decisions.of(who, Acl.DESCRIBE, Acl.GROUP, log=False), groups, lambda each: each.group_id)


def leave_out_offsets(response: FetchOffsetsResponse, who: Caller) -> None:
    """Take out the offsets of topics that the caller may not describe."""
    topics = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC, log=False)
    if topics is not None:
        shown = [offset for offset in response.offsets if topics.allow(offset.topic)]
        del response.offsets[:]
        response.offsets.extend(shown)


def check_described(group: GroupDescription, who: Caller) -> None:
    """Check that a group may be shown: it is shown whole, with all topics of its members, or not at all (KIP-848).

    Raises:
        TopicAuthorizationFailed: the caller may not describe one of them; which one is not said.
    """
    topics = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC, log=False)
    if topics is None:
        return
    for member in group.members:
        parts = chain(member.assigned, member.target, member.pending_revocation)
        if not all(map(topics.allow, chain(member.subscription.topics, (part.topic for part in parts)))):
            raise TopicAuthorizationFailed(
                f"group {group.group_id!r} reads topics that {who.principal} may not DESCRIBE; its members stay hidden"
            )
