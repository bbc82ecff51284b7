"""Members of groups that let the coordinator assign (KIP-848), as Kafka's clients speak: a heartbeat is a request.

raftlog's own members have a stream for as long as they live. A `PolledMember` stands for such a stream: the first
heartbeat opens it with a join, each later one is a heartbeat on it, and what the coordinator sends meanwhile waits for
the next response. So both kinds of clients may be members of one group.

    heartbeat with epoch 0                   join
    with epoch -1, -2                        leave; -2: of a static member that will be back
    else, over the connection of the last    heartbeat
    else, and it names its partitions        the member is back, on a new stream: its last response may be lost
    else, of a member that is unknown here   COORDINATOR_NOT_AVAILABLE: the client sends everything again

A heartbeat proves to the coordinator that the member has got every earlier assignment (`Session.heard`). This holds
over one connection. A client that misses a response closes the connection and says everything anew, its partitions
included.

A Kafka client takes its partitions in its own time: its application may be in a callback for long, while heartbeats go
on. The client reports partitions only once it reads them, and reports nothing as long as nothing has changed. So a
heartbeat without a report releases no partition of the client's assignment: the client may begin to read it at any
moment (`Session.heard`).

A regular expression is matched here, as raftlog's own clients match theirs: the coordinator gets the topics that match,
and again when others do. RE2 matches in a time that grows with the text only, and a thread does it, so that no client
holds up the event loop of all groups (ADR 0014, ADR 0039). One expression is matched at a time: one that is large or
takes long is refused, so that the others need not wait for it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import re2
from google.protobuf.message import Message

from broker.config.config import BrokerConfig
from broker.coordinator.core import Reply
from broker.coordinator.groups.checks import MAX_PATTERN
from broker.coordinator.groups.commands import Heartbeat, Join, Leave
from broker.coordinator.groups.coordinators import GroupShard
from broker.kafka import errors
from broker.kafka import messages as api
from broker.kafka.codec import Fields
from broker.kafka.groups import (
    GROUPS_AT_A_TIME,
    MAX_CLIENT_ID,
    STATES,
    CallService,
    Handler,
    code_of,
    tell_operations,
)
from broker.kafka.parts import once
from broker.net.services.groups import GroupService, MemberPermissions
from broker.security.caller import Caller
from broker.turns import in_turns
from raftlog.errors import (
    BrokerOverloaded,
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    UnknownMemberId,
)
from raftlog.v1 import group_pb2
from raftmeta.image import MetadataImage

REGEX_EVERY_S: Final = 10.0
"""How often a member's regular expression is matched again, at most; it is while topics come and go."""
MAX_MATCHED: Final = 1_000
"""Regular expressions whose last matches are kept."""
MAX_REGEX_BYTES: Final = 1 << 20
"""What an expression may take in memory, compiled."""
MAX_PROGRAM: Final = 2_000
"""RE2's instructions of an expression; each character of a name may take a step for each of them."""
MAX_MATCH_S: Final = 2.0
"""Processor time that matching an expression with all topics may take."""
MAX_WAIT_S: Final = 5.0
"""How long an expression waits for others at most; the client tries again then."""
UNIFORM: Final = "uniform"
"""Kafka's name for the assignor that is `sticky` here."""
STICKY: Final = "sticky"
LEAVES: Final = -1
LEAVES_FOR_A_WHILE: Final = -2
CLASSIC_MEMBER: Final = 0
CONSUMER_MEMBER: Final = 1
"""Types of members in a description: this one speaks KIP-848."""


class InvalidRegularExpression(Exception):
    """A regular expression that RE2 does not take; the text says why."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a member subscribes to: topics by name, and those that match a regular expression, if any."""

    names: tuple[str, ...] = ()
    regex: str = ""
    assignor: str = ""


class Matches:
    """The topics that match regular expressions, all of their names; without internal ones."""

    def __init__(self, image: Callable[[], MetadataImage]) -> None:
        self._image = image
        self._found: dict[str, tuple[Mapping[str, bytes], tuple[str, ...], str]] = {}
        """By expression: for which topics it was matched, which did, and why it is refused, if it is."""
        self._one_at_a_time = asyncio.Lock()

    async def of(self, regex: str) -> tuple[str, ...]:
        """Return the topics that match.

        Raises:
            InvalidRegularExpression: it is none, or takes too much to match.
            InvalidRequestError: it is too long.
            CoordinatorNotAvailable: others are being matched.
        """
        if len(regex) > MAX_PATTERN:
            raise InvalidRequestError(f"the regular expression has {len(regex)} characters, at most {MAX_PATTERN}")
        if not self._is_known(regex):
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await self._one_at_a_time.acquire()
            except TimeoutError:
                raise CoordinatorNotAvailable("the broker is matching other regular expressions; try again") from None
            matching = asyncio.ensure_future(self._match(regex))
            matching.add_done_callback(lambda _: self._one_at_a_time.release())
            await asyncio.shield(matching)  # the thread goes on even if the client is gone
        found = self._found[regex] = self._found.pop(regex)  # the last one that was asked for comes last
        _, names, refusal = found
        if refusal:
            raise InvalidRegularExpression(refusal)
        return names

    def _is_known(self, regex: str) -> bool:
        return regex in self._found and self._found[regex][0] is self._image().topic_id_by_name

    async def _match(self, regex: str) -> None:
        if self._is_known(regex):  # another member has had it matched meanwhile
            return
        image = self._image()
        names: tuple[str, ...] = ()
        refusal = ""
        try:
            names = await asyncio.to_thread(_matching, regex, image)
        except InvalidRegularExpression as error:
            refusal = str(error)
        self._found.pop(regex, None)
        self._found[regex] = image.topic_id_by_name, names, refusal
        if len(self._found) > MAX_MATCHED:
            del self._found[next(iter(self._found))]  # the one that was asked for longest ago


def _matching(regex: str, image: MetadataImage) -> tuple[str, ...]:
    options = re2.Options()
    options.max_mem = MAX_REGEX_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(regex, options)
    except re2.error as error:
        why = error.args[0] if error.args else ""
        text = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
        raise InvalidRegularExpression(f"{regex!r} is no regular expression of RE2: {text}") from None
    if compiled.programsize > MAX_PROGRAM:
        raise InvalidRegularExpression(
            f"{regex!r} is too large: RE2 makes {compiled.programsize} instructions of it, {MAX_PROGRAM} are allowed"
        )
    until_s = time.thread_time() + MAX_MATCH_S
    matched = []
    for name, key in image.topic_id_by_name.items():
        if compiled.fullmatch(name) is not None and not image.topics[key].internal:
            matched.append(name)
        if time.thread_time() > until_s:
            raise InvalidRegularExpression(f"{regex!r} takes too long to match with all topics: simplify it")
    return tuple(sorted(matched))


class PolledMember:
    """The stream of one member: what the coordinator sends, until the member asks."""

    is_stream = True

    def __init__(self, shard: GroupShard, connection: object, forget: Callable[[PolledMember], None]) -> None:
        self.shard = shard
        self.connection = connection
        self.subscription = group_pb2.Subscription()
        self.wish = Wish()
        self.matched_s = 0.0
        """When its regular expression was matched."""
        self.assignment: group_pb2.GroupAssignment | None = None
        """The last one that the coordinator has sent."""
        self.told: group_pb2.GroupAssignment | None = None
        """The last one in a response."""
        self.news: frozenset[tuple[bytes, int]] = frozenset()
        """The partitions of those in responses that the coordinator does not know of yet."""
        self.failure: RaftlogError | None = None
        self.is_over = False
        self._forget = forget
        self._answered: asyncio.Future[None] | None = None
        self._waits_for_assignment = False

    def deliver(self, message: Message | Reply | RaftlogError | None) -> None:
        """Take what the coordinator sends."""
        if self.is_over:
            return
        if message is None or isinstance(message, RaftlogError):
            self.failure = message
            self.close()
            self._answer()
            return
        assert isinstance(message, group_pb2.GroupResponse), "members get GroupResponses only"
        if message.HasField("assignment"):
            self.assignment = message.assignment
            if self._waits_for_assignment:
                self._answer()
        elif message.HasField("heartbeat"):
            self._answer()

    def _answer(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def check_idle(self) -> None:
        """Check that no command is under way.

        Raises:
            BrokerOverloaded: one is.
        """
        if self._answered is not None and not self._answered.done():
            raise BrokerOverloaded("another heartbeat of this member is under way")

    async def ask(self, command: Any, wait_s: float, *, for_assignment: bool = False) -> None:
        """Submit a command, and wait for its answer.

        Raises:
            RaftlogError: the membership is over.
            BrokerOverloaded: another command is under way.
            RequestTimedOut: there was no answer in time.
        """
        self.check_idle()
        self._answered = asyncio.get_running_loop().create_future()
        self._waits_for_assignment = for_assignment
        self.shard.submit(command, self)
        try:
            async with asyncio.timeout(wait_s):
                await self._answered
        except TimeoutError:
            raise RequestTimedOut("the coordinator has not answered; it may be waiting for its replicas") from None
        finally:
            if self._answered.cancelled():  # its answer may still come, and would pass for that of a later heartbeat
                self.close()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """The stream is over, whichever end has ended it."""
        self.is_over = True
        self.shard.detach(self)
        self._forget(self)


class ConsumerGroupApis:
    """The handlers of one broker, by API key."""

    def __init__(
        self, service: GroupService, config: BrokerConfig, call: CallService, image: Callable[[], MetadataImage]
    ) -> None:
        self._service = service
        self._config = config
        self._call = call
        self._matches = Matches(image)
        self._members: dict[tuple[str, str], PolledMember] = {}
        self.handlers: dict[int, Handler] = {
            api.CONSUMER_GROUP_HEARTBEAT: self._heartbeat,
            api.CONSUMER_GROUP_DESCRIBE: self._describe,
        }

    @property
    def _wait_s(self) -> float:
        return self._config.request_timeout_ms / 1_000

    # Members

    async def _heartbeat(self, request: Fields, version: int, who: Caller) -> Fields:
        member_id, epoch = request["member_id"], request["member_epoch"]
        if not member_id and version == 0 and epoch == 0:
            member_id = str(uuid.uuid4())
        key = request["group_id"], member_id
        try:
            permissions = MemberPermissions.of(who, self._service.topic_name)
            if permissions is not None:
                permissions.check_group(key[0])  # for a leave, too: nothing says that this client is the member
            if epoch in (LEAVES, LEAVES_FOR_A_WHILE):
                await self._leave(key, request)
                return {"error_code": errors.NONE, "member_id": member_id, "member_epoch": epoch}
            is_full = request["subscribed_topic_names"] is not None or bool(request["subscribed_topic_regex"])
            wish = self._wish(request, self._members.get(key))
            subscription = None if wish is None else await self._subscription(wish)
            if permissions is not None and subscription is not None:
                await permissions.check_subscription(subscription)
            member = await self._polled(key, request, subscription, who)
            if wish is not None:
                member.wish, member.matched_s = wish, time.monotonic()
        except (RaftlogError, InvalidRegularExpression) as error:
            return {
                "error_code": code_of(error) if isinstance(error, RaftlogError) else errors.INVALID_REGULAR_EXPRESSION,
                "error_message": str(error),
                "member_id": member_id,
                "member_epoch": epoch,
            }
        return self._answer(member_id, member, is_full=is_full)

    def _answer(self, member_id: str, member: PolledMember, *, is_full: bool) -> Fields:
        assignment = member.assignment
        response: Fields = {
            "error_code": errors.NONE,
            "member_id": member_id,
            "member_epoch": 0 if assignment is None else assignment.member_epoch,
            "heartbeat_interval_ms": self._config.group_consumer_heartbeat_interval_ms,
        }
        if assignment is not None and (is_full or assignment is not member.told):
            response["assignment"] = {
                "topic_partitions": [
                    {"topic_id": each.topic_id, "partitions": list(each.partitions)} for each in assignment.topics
                ]
            }
            member.news |= {(each.topic_id, number) for each in assignment.topics for number in each.partitions}
        member.told = assignment
        return response

    async def _polled(
        self, key: tuple[str, str], request: Fields, subscription: group_pb2.Subscription | None, who: Caller
    ) -> PolledMember:
        """Bring a heartbeat to the coordinator; return the member with what it has been sent."""
        connection = asyncio.current_task()
        member = self._members.get(key)
        owned = request["topic_partitions"]
        is_new_stream = member is None or request["member_epoch"] == 0
        if member is not None and owned is not None and member.connection is not connection:
            is_new_stream = True
        if not is_new_stream:
            assert member is not None, "else it needs a new stream"
            member.connection = connection
            heartbeat = group_pb2.GroupHeartbeat(member_epoch=request["member_epoch"])
            if subscription is not None and subscription != member.subscription:
                heartbeat.subscription.CopyFrom(subscription)
                member.subscription = subscription
            if owned is not None:
                heartbeat.owned.SetInParent()
                heartbeat.owned.partitions.extend(_partitions(owned))
            member.check_idle()  # else the coordinator would never know the news
            news, member.news = member.news, frozenset()
            await member.ask(Heartbeat(member, *key, heartbeat, news), self._wait_s)
            return member
        if subscription is None or (owned is None and request["member_epoch"] > 0):
            raise CoordinatorNotAvailable("the member is not known here: it sends all of its fields again")
        if member is not None:
            member.close()
        shard = self._service.shard_of(key[0])
        member = self._members[key] = PolledMember(shard, connection, lambda gone: self._forget(key, gone))
        member.subscription = subscription
        join = group_pb2.JoinGroup(
            group_id=key[0],
            member_id=key[1],
            member_epoch=request["member_epoch"],
            instance_id=request["instance_id"] or "",
            client_id=request["client_id"][:MAX_CLIENT_ID],
            rack=request["rack_id"] or "",
            subscription=subscription,
            rebalance_timeout_ms=max(request["rebalance_timeout_ms"], 0),
            owned=_partitions(owned or ()) if request["member_epoch"] > 0 else (),
        )
        command = Join(member, join, who.host, who.user, reports_late=True)
        await member.ask(command, self._wait_s, for_assignment=True)
        return member

    async def _leave(self, key: tuple[str, str], request: Fields) -> None:
        member = self._members.get(key)
        if member is None:
            raise UnknownMemberId(f"the group {key[0]!r} has no member {key[1]} on this broker")
        leave = group_pb2.LeaveGroup(keep_assignment=request["member_epoch"] == LEAVES_FOR_A_WHILE)
        try:
            await member.ask(Leave(member, *key, leave), self._wait_s)
        finally:
            member.close()

    def _forget(self, key: tuple[str, str], member: PolledMember) -> None:
        if self._members.get(key) is member:
            del self._members[key]

    @staticmethod
    def _wish(request: Fields, member: PolledMember | None) -> Wish | None:
        """Return what a member subscribes to from now on; None: what it did before, and that needs no other look."""
        names, regex = request["subscribed_topic_names"], request["subscribed_topic_regex"]
        if request["member_epoch"] == 0 or member is None:
            before = Wish()
            if names is None and not regex:
                return None
        else:
            before = member.wish
            if names is None and regex is None:
                is_due = before.regex and time.monotonic() - member.matched_s >= REGEX_EVERY_S
                return before if is_due else None
        assignor = request["server_assignor"]
        return Wish(
            before.names if names is None else tuple(sorted(set(names))),
            before.regex if regex is None else regex,
            before.assignor if assignor is None else STICKY if assignor == UNIFORM else assignor,
        )

    async def _subscription(self, wish: Wish) -> group_pb2.Subscription:
        matched = await self._matches.of(wish.regex) if wish.regex else ()
        return group_pb2.Subscription(
            topics=sorted({*wish.names, *matched}), pattern=wish.regex, assignor=wish.assignor
        )

    # Tools

    async def _describe(self, request: Fields, version: int, who: Caller) -> Fields:
        named = await once(request["group_ids"])
        groups = [await self._described(group_id, who) async for group_id in in_turns(named, GROUPS_AT_A_TIME)]
        if request["include_authorized_operations"]:
            await tell_operations(groups, who)
        return {"groups": groups}

    async def _described(self, group_id: str, who: Caller) -> Fields:
        asked = group_pb2.DescribeGroupsRequest(group_ids=[group_id])
        try:
            answer = await self._call("Group/DescribeGroups", self._service.DescribeGroups, asked, who)
            group: group_pb2.GroupDescription = answer.groups[0]
            if group.HasField("error"):
                raise errors.error_of(group.error)
            if group.type == group_pb2.GROUP_TYPE_CLASSIC:
                raise GroupIdNotFound(f"the group {group_id!r} is a classic one")
        except RaftlogError as error:
            state = STATES[group_pb2.DEAD] if isinstance(error, GroupIdNotFound) else ""
            return {
                "error_code": code_of(error),
                "error_message": str(error),
                "group_id": group_id,
                "group_state": state,
                "assignor_name": "",
                "members": [],
            }
        return {
            "error_code": errors.NONE,
            "group_id": group_id,
            "group_state": STATES.get(group.state, ""),
            "group_epoch": group.group_epoch,
            "assignment_epoch": group.assignment_epoch,
            "assignor_name": UNIFORM if group.assignor == STICKY else group.assignor,
            "members": [
                {
                    "member_id": each.member_id,
                    "instance_id": each.instance_id or None,
                    "rack_id": each.rack or None,
                    "member_epoch": each.member_epoch,
                    "client_id": each.client_id,
                    "client_host": f"/{each.host}",
                    "subscribed_topic_names": list(each.subscription.topics),
                    "subscribed_topic_regex": each.subscription.pattern or None,
                    "assignment": {"topic_partitions": _named(each.assigned)},
                    "target_assignment": {"topic_partitions": _named(each.target)},
                    "member_type": CLASSIC_MEMBER if each.speaks_classic else CONSUMER_MEMBER,
                }
                for each in group.members
            ],
        }


def _partitions(topics: Any) -> list[group_pb2.TopicPartitions]:
    return [
        group_pb2.TopicPartitions(topic_id=each["topic_id"], partitions=sorted(set(each["partitions"])))
        for each in topics
    ]


def _named(topics: Any) -> list[Fields]:
    return [
        {"topic_id": each.topic_id or bytes(16), "topic_name": each.topic, "partitions": list(each.partitions)}
        for each in topics
    ]
