"""A stream between a member and the coordinator: in order in both directions, until it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from broker.coordinator.groups.commands import Command, Join
from raftlog.errors import RaftlogError

if TYPE_CHECKING:
    from tests.simulation.groups.client import Client
    from tests.simulation.groups.world import World


class Link:
    """`deliver` is the coordinator's token of it. What a client gives up may arrive all the same, late."""

    def __init__(self, world: World, client: Client) -> None:
        self._world = world
        self._client = client
        self.term = world.term
        self.joined: str | None = None
        self.up_at_ms = self._down_at_ms = 0.0
        self.broken = False
        self.deliver: Callable[[Message | RaftlogError | None], None] = self._deliver

    def send(self, command: Command) -> None:
        """From the member to the coordinator."""
        if self.broken:
            return
        self.up_at_ms = max(self.up_at_ms, self._world.now_ms + self._world.delay())
        self._world.at(self.up_at_ms - self._world.now_ms, lambda: self._arrive(command))

    def _arrive(self, command: Command) -> None:
        if self._world.up and self._world.term == self.term:
            if isinstance(command, Join):
                self.joined = command.request.member_id
            self._world.submit(command)

    def _deliver(self, message: Message | RaftlogError | None) -> None:
        if self.broken:
            return
        self._down_at_ms = max(self._down_at_ms, self._world.now_ms + self._world.delay())
        self._world.at(self._down_at_ms - self._world.now_ms, lambda: self._client.receive(self, message))

    def break_off(self, delay_ms: float) -> None:
        """Both ends send nothing more, and each notices at its own time. Messages in flight arrive."""
        if not self.broken:
            self.broken = True
            self._world.at(max(delay_ms, self._down_at_ms - self._world.now_ms), lambda: self._client.lost_link(self))
            self._world.at(max(self._world.delay(), self.up_at_ms - self._world.now_ms), self._server_notices)

    def _server_notices(self) -> None:
        self._world.server_notices(self)
