"""Offsets of a group that are committed with a transaction, at the group's coordinator (KIP-98, KIP-447)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from raftlog._client.connections import Connections
from raftlog._client.coordinators import CoordinatorOptions, Coordinators
from raftlog._client.group_offsets import Entry, in_pieces, passes, to_commit
from raftlog._client.group_session import commit_errors
from raftlog._client.metadata import MetadataCache
from raftlog._client.producer_ids import ProducerId
from raftlog._client.transaction_calls import LEAST_S
from raftlog._delivery import Deadline
from raftlog.errors import RaftlogError, RequestTimedOut, StaleMemberEpoch
from raftlog.types import GroupMetadata, OffsetAndMetadata, TopicPartition
from raftlog.v1 import group_pb2


class TransactionOffsets:
    """Every call is sent again while the refusal may pass; what is committed twice is the same."""

    def __init__(self, metadata: MetadataCache, connections: Connections, options: CoordinatorOptions) -> None:
        self._options = options
        self._coordinators = Coordinators(metadata, connections, options)

    async def commit(
        self,
        transactional_id: str,
        producer: ProducerId,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: GroupMetadata,
        deadline: Deadline,
    ) -> None:
        """Hand offsets to the group, which keeps them until the transaction ends.

        Raises:
            FencedError: the group has given this member up, or its epoch has changed since `group` was asked for.
            RequestTimedOut: not within the deadline.
            RaftlogError: refused for good.
        """
        for piece in in_pieces(to_commit((part, Entry(offset, b"")) for part, offset in offsets.items())):
            request = group_pb2.CommitTransactionOffsetsRequest(
                group_id=group.group_id,
                transactional_id=transactional_id,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                member_id=group.member_id,
                member_epoch=group.member_epoch,
                instance_id=group.group_instance_id,
                offsets=piece,
            )
            await self._commit(group.group_id, request, piece, deadline)

    async def _commit(
        self,
        group_id: str,
        request: group_pb2.CommitTransactionOffsetsRequest,
        piece: Sequence[group_pb2.CommitOffset],
        deadline: Deadline,
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        failures = 0
        while True:
            left_s = deadline.left()
            attempt_s = self._options.request_timeout_ms / 1000
            if left_s is not None:
                attempt_s = min(attempt_s, max(left_s, LEAST_S))
            error: RaftlogError | None = None
            try:
                async with asyncio.timeout(attempt_s):
                    response = await self._coordinators.call(group_id, "CommitTransactionOffsets", request, attempt_s)
                error = next(filter(None, commit_errors(None, response.results, len(piece))), None)
            except TimeoutError:
                error = RequestTimedOut(f"the coordinator of group {group_id} has not answered in time")
            except RaftlogError as refused:
                error = refused
            if error is None:
                return
            # A member's epoch is what the caller has asked for before he read: he has to look, and read, again.
            if isinstance(error, StaleMemberEpoch) or not passes(error, loop.time() - began_s):
                raise error
            failures += 1
            pause_s = self._options.pauses.after_ms(error, failures) / 1000
            left_s = deadline.left()
            if left_s is not None and left_s <= pause_s:
                raise RequestTimedOut(f"group {group_id} has not taken the offsets in time; last error: {error}")
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Look nothing up any more."""
        await self._coordinators.close()
