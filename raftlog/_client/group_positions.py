"""Where a consumer with a group begins, and what it commits."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final, cast

from raftlog._client.consumer import ConsumerEngine
from raftlog._client.coordinators import Coordinators
from raftlog._client.fetcher import monotonic_ms
from raftlog._client.group_offsets import Claim, Claims, CommitQueue, Entry, GroupOffsets, Offsets, in_pieces, to_commit
from raftlog._client.options import ConsumerOptions
from raftlog._core.cluster import TopicView
from raftlog._core.membership import Identity, Membership
from raftlog._core.positions import PartitionState
from raftlog.errors import ClosedError, InvalidRequestError, PartitionNotOwned, RaftlogError, RetriableError
from raftlog.types import OffsetAndMetadata, TopicPartition
from raftlog.v1 import common_pb2, group_pb2

logger = logging.getLogger(__name__)

COMMITTED: Final = "committed"
"""Where a partition begins that the group is asked about first."""


class GroupPositions(ConsumerEngine):
    """Starts come from the group's offsets, and go there: as a member, or, with `assign`, as nobody's."""

    def __init__(self, bootstrap: list[str], options: ConsumerOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(bootstrap, options, loop)
        self.group_id = options.group_id
        self.coordinators = Coordinators(self.metadata, self.connections, options)
        self.membership = Membership(
            Identity(
                group_id=options.group_id,
                member_id=uuid.uuid4().hex,
                instance_id=options.group_instance_id,
                client_id=options.client_id,
                rack=options.client_rack,
                rebalance_timeout_ms=int(options.max_poll_interval_ms),
                assignor=options.group_remote_assignor,
            )
        )
        self.offsets = GroupOffsets(
            options.group_id,
            self.coordinators,
            options,
            require_stable=options.isolation_level == common_pb2.READ_COMMITTED,
        )
        self.commits = CommitQueue(
            self._send_commit,
            claim=self._claim,
            pause_ms=options.pauses.after_ms,
            on_committed=self._on_committed,
        )
        self.committed_offsets: dict[TopicPartition, int] = {}
        """What this consumer knows to be committed, of partitions that it reads."""
        self._resets: dict[TopicPartition, str] = {}
        """Where to begin if nothing is committed."""

    async def _commit_as_member(self, offsets: list[group_pb2.CommitOffset]) -> list[RaftlogError | None]:
        """Commit once; return what became of each."""
        raise NotImplementedError

    # Where to begin

    def _add(self, view: TopicView, partition: int, reset: str) -> None:
        topic_partition = TopicPartition(view.name, partition)
        self._resets[topic_partition] = reset
        self.positions.add(PartitionState(topic_partition, view.topic_id, COMMITTED))

    def _start_placing(self, states: list[PartitionState]) -> None:
        asked = [state for state in states if state.reset == COMMITTED and state not in self._asking]
        if asked:
            self._asking.update(asked)
            task = self.loop.create_task(self._place_committed(asked))
            self._placing[task] = None
            task.add_done_callback(self._placing.pop)
        super()._start_placing([state for state in states if state.reset != COMMITTED])

    async def _place_committed(self, states: list[PartitionState]) -> None:
        wanted = {state.topic_partition: state.topic_id for state in states}
        found: Mapping[TopicPartition, OffsetAndMetadata | RaftlogError | None]
        try:
            member = ("", -1)
            if self.subscribed:
                member = (self.membership.identity.member_id, self.membership.member_epoch)
            found = await self.offsets.fetch(wanted, member)
        except RaftlogError as error:
            found = dict.fromkeys(wanted, error)
        except Exception as bug:  # one of ours: it must not strand the partitions, which are asked for again
            logger.exception("group %s: asking for committed offsets failed", self.group_id)
            found = dict.fromkeys(wanted, RetriableError(f"asking for committed offsets failed: {bug!r}"))
        finally:
            self._asking.difference_update(states)
        with self.lock:
            for state in states:
                part = state.topic_partition
                if self.positions.states.get(part) is not state or not state.unplaced or state.reset != COMMITTED:
                    continue  # a seek was faster, or it is somebody else's
                answer = found[part]
                if isinstance(answer, RaftlogError):
                    self._start_refused(state, answer)
                    continue
                state.failures = 0
                state.missing_since_ms = None
                if answer is None:
                    state.reset = self._resets[part]
                else:
                    state.position, state.last_epoch = answer.offset, answer.leader_epoch
                    self.committed_offsets[part] = answer.offset
        self.request_sync()

    async def _place(self, node_id: int, states: list[PartitionState]) -> None:
        first = [state for state in states if state.reset == "latest"]
        await super()._place(node_id, states)
        if not self.subscribed:
            return
        # Else who crashes before its first commit is followed by one that begins at the end, too, but a later one.
        found = {
            state.topic_partition: OffsetAndMetadata(state.position)
            for state in first
            if state.position is not None and self.positions.states.get(state.topic_partition) is state
            if state.topic_partition not in self.committed_offsets
        }
        self.commit(found, self.claims(found), self.options.default_api_timeout_ms)

    # Offsets

    def claims(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Claim]:
        """Return by whom each partition is read, and of which topic it is, for `commit`; from any thread.

        Raises:
            PartitionNotOwned: this member does not read it.
        """
        found: dict[TopicPartition, Claim] = {}
        with self.lock:
            for part in partitions:
                claim = found[part] = self._claim(part)
                if self.subscribed and claim.owner is None:
                    raise PartitionNotOwned(
                        f"{part} is not, or not any more, assigned to this member of {self.group_id}"
                    )
        return found

    def _claim(self, part: TopicPartition) -> Claim:
        state = self.positions.states.get(part)
        if state is not None:
            return Claim(state if self.subscribed else None, state.topic_id)
        topic = self.metadata.view.topics.get(part.topic)
        return Claim(None, topic.topic_id if topic is not None else b"")

    def commit(self, offsets: Offsets, claims: Claims, timeout_ms: float) -> asyncio.Future[None]:
        """Queue a commit behind those before."""
        if self.closed is not None:
            raise ClosedError("the consumer is closed")
        return self.commits.put(offsets, claims, timeout_ms)

    async def commit_now(self, offsets: Offsets, claims: Claims, timeout_ms: float | None = None) -> None:
        """Commit, and wait until it is done.

        Raises:
            RaftlogError: what a partition was refused with, when it is final or the time has passed.
        """
        self.check_open()
        await asyncio.shield(
            self.commit(offsets, claims, self.options.default_api_timeout_ms if timeout_ms is None else timeout_ms)
        )

    def commit_soon(
        self,
        offsets: dict[TopicPartition, OffsetAndMetadata],
        claims: Claims,
        over: Callable[[dict[TopicPartition, OffsetAndMetadata], RaftlogError | None], object],
        refused: RaftlogError | None = None,
    ) -> None:
        """Commit in the background, in the order of the calls, from any thread; `over` is called on the event loop.

        With `refused` nothing is committed, and `over` is told that.
        """

        def start() -> None:
            if self.closed is not None or refused is not None:
                finish(refused or self.closed)
                return
            future = self.commit(offsets, claims, self.options.default_api_timeout_ms)
            future.add_done_callback(
                lambda done: finish(None if done.cancelled() else cast("RaftlogError | None", done.exception()))
            )

        def finish(error: RaftlogError | None) -> None:
            try:
                over(offsets, error)
            except Exception:  # the application's
                logger.exception("a commit callback failed")

        if self._on_loop():  # before whatever the caller does next
            start()
        else:
            self._call_soon(start)

    def _on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    async def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return what is committed.

        Raises:
            RaftlogError: the coordinator is not there within `default.api.timeout.ms`, or refuses.
        """
        self.check_open()
        wanted = {TopicPartition(*part): b"" for part in partitions}
        if not wanted:
            return {}

        async def ask() -> dict[TopicPartition, OffsetAndMetadata | None]:
            found: dict[TopicPartition, OffsetAndMetadata | None] = {}
            for part, answer in (await self.offsets.fetch(wanted)).items():
                if isinstance(answer, RaftlogError):
                    raise answer
                found[part] = answer
            return found

        return await self.offsets.retried(ask, self.options.default_api_timeout_ms)

    async def _send_commit(self, entries: Mapping[TopicPartition, Entry]) -> dict[TopicPartition, RaftlogError | None]:
        """Commit once, in as many requests as it takes; after one that nobody takes the rest has to wait."""
        errors: list[RaftlogError | None] = []
        began_ms = monotonic_ms()
        for piece in in_pieces(to_commit(entries.items())):
            try:
                errors += await (self._commit_as_member(piece) if self.subscribed else self.offsets.commit(piece))
            except InvalidRequestError as refused:
                errors += [refused] * len(piece)
            except RaftlogError as refused:
                errors += [refused] * (len(entries) - len(errors))
                break
        now_ms = monotonic_ms()
        self.figures.committed(now_ms - began_ms, now_ms / 1_000, failed=any(errors))
        return dict(zip(entries, errors, strict=True))

    def _on_committed(self, offsets: Offsets) -> None:
        for part, offset in offsets.items():
            if part in self.positions.states:
                self.committed_offsets[part] = offset.offset
