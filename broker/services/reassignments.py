"""AlterReassignments: several partitions in one request, each of them a command of its own (KIP-455)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from raftlog.errors import InvalidRequestError, RaftlogError
from raftlog.v1.admin_pb2 import Reassignment
from raftlog.v1.records_pb2 import AlterReassignmentsCommand, MetadataCommand
from raftmeta.port import MetadataPort

MAX_REASSIGNMENTS: Final = 1_000
AT_A_TIME: Final = 16
"""Commands under way at once: other proposals of this broker have their turn as well."""


async def propose_reassignments(
    metadata: MetadataPort, reassignments: Sequence[Reassignment]
) -> list[int | RaftlogError]:
    """Propose them; return, in their order, the metadata offset at which each is in effect, or why it is not.

    Raises:
        InvalidRequestError: too many, or one partition twice.
    """
    if len(reassignments) > MAX_REASSIGNMENTS:
        raise InvalidRequestError(
            f"{len(reassignments)} reassignments in one request, at most {MAX_REASSIGNMENTS} are allowed"
        )
    named: set[tuple[str, int]] = set()
    for each in reassignments:
        if (each.topic, each.partition) in named:
            raise InvalidRequestError(f"{each.topic[:249]}-{each.partition} is named twice in one request")
        named.add((each.topic, each.partition))
    limit = asyncio.Semaphore(AT_A_TIME)

    async def propose(each: Reassignment) -> int | RaftlogError:
        command = AlterReassignmentsCommand(topic=each.topic, partition=each.partition, replicas=each.replicas)
        async with limit:
            try:
                return (await metadata.propose(MetadataCommand(alter_reassignments=command))).offset
            except RaftlogError as error:
                return error

    return list(await asyncio.gather(*map(propose, reassignments)))
