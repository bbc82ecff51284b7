"""Members and a coordinator, both the real cores, with a network in between that delays, breaks and forgets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from broker.groups.commands import Command, Disconnected, Heartbeat, Join, Leave
from raftlog._core.membership import Identity, Membership, MemberState
from raftlog.errors import NotCoordinator, RaftlogError
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2
from tests.support.group_driver import GroupDriver, Stream

GROUP = "g"
LONGEST_DELAY_MS = 400.0


@dataclass(eq=False)
class Link:
    """One stream: in order each way, and late. What was sent before one side gave it up may still arrive."""

    stream: Stream
    up: deque[tuple[float, group_pb2.GroupRequest | None]] = field(default_factory=deque)
    down: deque[tuple[float, object]] = field(default_factory=deque)
    taken: int = 0
    """Of `stream.got`: what is on its way down."""
    cut: bool = False
    """The coordinator that it led to is gone."""


class SimulatedMember:
    """A member whose application polls now and then."""

    def __init__(self, world: GroupWorld, number: int, topics: list[str]) -> None:
        self.world = world
        self.core = Membership(Identity(GROUP, f"{number:032x}", rebalance_timeout_ms=60_000))
        self.core.subscribe(topics, "")
        self.core.join()
        self.link: Link | None = None
        self.not_before_ms = 0.0
        self.polls = True

    def step(self, now_ms: float) -> None:
        """Do what a session does."""
        core, chance = self.core, self.world.chance
        if self.link is not None:
            self._read(self.link, now_ms)
        if core.expire(now_ms) or core.is_silent(now_ms):
            self.drop(now_ms)
        if self.link is None and core.wants_stream and now_ms >= self.not_before_ms:
            self.link = self.world.open(Stream(core.identity.member_id))
            self._send(core.opened(now_ms), now_ms)
        if self.link is not None and (heartbeat := core.heartbeat(now_ms)) is not None:
            self._send(heartbeat, now_ms)
        if self.polls and chance.random() < 0.3:
            self.poll()

    def poll(self) -> None:
        """Bring about one thing that the coordinator wants."""
        core = self.core
        if core.lost:
            core.told_of_loss(list(core.lost))
        elif release := core.to_release():
            core.released(release)
        elif take := core.to_take():
            core.taken(take)

    def drop(self, now_ms: float) -> None:
        """Give the stream up; the coordinator hears of it later."""
        if self.link is not None:
            self._send(None, now_ms)
            self.link = None
        self.core.closed()
        self.not_before_ms = now_ms + self.world.delay_ms()

    def leave(self, now_ms: float) -> None:
        """Leave for good."""
        request = self.core.leave()
        if request is not None and self.link is not None:
            self._send(request, now_ms)
            self._send(None, now_ms)
        self.link = None

    def _send(self, request: group_pb2.GroupRequest | None, now_ms: float) -> None:
        assert self.link is not None
        last_ms = self.link.up[-1][0] if self.link.up else 0.0
        self.link.up.append((max(last_ms, now_ms + self.world.delay_ms()), request))

    def _read(self, link: Link, now_ms: float) -> None:
        while link is self.link and link.down and link.down[0][0] <= now_ms:
            _, message = link.down.popleft()
            if isinstance(message, group_pb2.GroupResponse):
                if message.HasField("assignment"):
                    self.core.on_assignment(message.assignment, now_ms)
                elif message.HasField("heartbeat"):
                    self.core.on_heartbeat(message.heartbeat)
            else:
                self.drop(now_ms)
                if isinstance(message, RaftlogError):
                    self.core.on_error(message)


class GroupWorld:
    """A group of members; `step` lets a little time go by, `check` looks for a partition with two owners."""

    def __init__(self, chance: Random, driver: GroupDriver) -> None:
        self.chance = chance
        self.driver = driver
        self.members: list[SimulatedMember] = []
        self.links: list[Link] = []
        self.calm = False

    def add(self, number: int, topics: list[str]) -> SimulatedMember:
        """Let one more member come."""
        member = SimulatedMember(self, number, topics)
        self.members.append(member)
        return member

    def delay_ms(self) -> float:
        """Return how late a message is."""
        if self.calm or self.chance.random() < 0.7:
            return self.chance.uniform(0.0, 10.0)
        return self.chance.uniform(0.0, LONGEST_DELAY_MS)

    def open(self, stream: Stream) -> Link:
        """Begin a stream to who coordinates."""
        link = Link(stream)
        self.links.append(link)
        return link

    def restart(self) -> None:
        """Another coordinator, from the log: what was under way to the former one is gone."""
        for link in self.links:
            link.up.clear()
            link.cut = True
            link.down.append((self.driver.now_ms + self.delay_ms(), NotCoordinator("it is another one")))
        self.links = []
        self.driver.restart()

    def step(self) -> None:
        """Let time go by, and everybody act."""
        self.driver.wait(self.chance.uniform(1.0, 60.0))
        now_ms = self.driver.now_ms
        for link in list(self.links):
            while not link.cut and link.up and link.up[0][0] <= now_ms:
                self._deliver(link, link.up.popleft()[1])
        for link in self.links:
            self._push(link, now_ms)
        for member in self.members:
            member.step(now_ms)
        self.check()

    def _deliver(self, link: Link, request: group_pb2.GroupRequest | None) -> None:
        stream, command = link.stream, None
        name: Command | None
        if request is None:
            name = Disconnected(stream, GROUP, stream.name)
            self.links.remove(link)
            link.cut = True
        elif request.HasField("join"):
            name = Join(stream, request.join, "10.0.0.1")
        elif request.HasField("heartbeat"):
            name = Heartbeat(stream, GROUP, stream.name, request.heartbeat)
        else:
            name = Leave(stream, GROUP, stream.name, request.leave)
        command = name
        self.driver.decide(command)

    def _push(self, link: Link, now_ms: float) -> None:
        last_ms = link.down[-1][0] if link.down else 0.0
        for message in link.stream.got[link.taken :]:
            last_ms = max(last_ms, now_ms + self.delay_ms())
            link.down.append((last_ms, message))
        link.taken = len(link.stream.got)

    def owners(self) -> dict[TopicPartition, list[str]]:
        """Return who believes to own what, and has reason to."""
        found: dict[TopicPartition, list[str]] = {}
        for member in self.members:
            core = member.core
            if core.is_member and self.driver.now_ms < core.session_deadline_ms:
                for part in core.owned:
                    found.setdefault(part, []).append(core.identity.member_id[-2:])
        return found

    def check(self) -> None:
        """No partition has two owners.

        Raises:
            AssertionError: names them.
        """
        double = {str(part): owners for part, owners in self.owners().items() if len(owners) > 1}
        assert not double, f"at {self.driver.now_ms:.0f} ms: {double}"

    @property
    def settled(self) -> bool:
        """Whether everybody has what he is to have."""
        return all(
            member.core.state is MemberState.MEMBER
            and not member.core.to_release()
            and not member.core.to_take()
            and not member.core.lost
            for member in self.members
        )
