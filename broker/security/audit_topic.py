"""The topic of audit records, `__audit`: what the audit log says, where consumers and the console read it.

    logger raftlog.audit -> handler -> queue in memory -> a task appends to a partition that this broker leads

Each line of the audit log (audit.py) becomes one record: the key is the principal, the value JSON with the fields of
the line, its time and the node. A request never waits for a record: the handler only adds to the queue, and the task
writes what has gathered every `EVERY_S`. The lines in the server's log are complete; of the records some can be lost:

- while this broker leads no partition of the topic with enough replicas in sync, the queue keeps the newest
  `MAX_WAITING` lines; the next record says how many were dropped;
- a broker that is killed loses what it has not written, `EVERY_S` of lines if it could write; a partition whose leader
  dies loses what no other replica has yet.

Only super users read the topic where there is an authorizer, as with all internal topics.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import pyarrow as pa

from broker.partition.partition import Partition
from raftlog.errors import LeaderNotAvailable, RaftlogError
from raftlog.format import Columns, encode_batch, parse_header
from raftmeta.image import TopicImage

logger = logging.getLogger(__name__)

EVERY_S: Final = 0.5
MAX_WAITING: Final = 10_000
MAX_BATCH: Final = 500
FIELDS: Final = (
    "principal",
    "host",
    "client_id",
    "operation",
    "resource_type",
    "resource",
    "allowed",
    "repeated",
    "left_out",
)


class AuditTopic(logging.Handler):
    """Writes the lines of the audit log into the topic. Attach it to the logger `raftlog.audit`; `run` is its task.

    `needed`: returns the topic, which is made if need be. `partitions`: those of this broker.
    """

    def __init__(
        self,
        node_id: int,
        needed: Callable[[], Awaitable[TopicImage]],
        partitions: Callable[[], Iterable[Partition]],
        now_ms: Callable[[], int],
    ) -> None:
        super().__init__(logging.DEBUG)
        self._node_id = node_id
        self._needed = needed
        self._partitions = partitions
        self._now_ms = now_ms
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._dropped = 0
        self._turn = 0
        self._silent = False

    def __len__(self) -> int:
        """Return how many lines wait to be written."""
        return len(self._waiting)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line. Never waits, and never fails the caller."""
        try:
            self._waiting.append(self._entry(record))
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._dropped += 1
        except (TypeError, ValueError, IndexError):
            self.handleError(record)

    def _entry(self, record: logging.LogRecord) -> tuple[bytes, bytes]:
        fields = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        line: dict[str, Any] = {
            "time_ms": round(record.created * 1000),
            "node": self._node_id,
            "event": record.getMessage(),
            **fields,
        }
        return str(fields.get("principal", "")).encode(), json.dumps(line, ensure_ascii=False).encode()

    async def run(self) -> None:
        """Write what has gathered, again and again; never returns."""
        while True:
            await asyncio.sleep(EVERY_S)
            if self._waiting:
                await self.write()

    async def write(self) -> bool:
        """Write the waiting lines; return whether none is left."""
        try:
            topic = await self._needed()
            while self._waiting:
                lines = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
                try:
                    self._append(topic, lines)
                except BaseException:
                    self._waiting.extendleft(reversed(lines))
                    raise
                await asyncio.sleep(0)
        except RaftlogError as error:
            if not self._silent:
                logger.warning("audit records wait to be written: %s", error)
            self._silent = True
            return False
        if self._silent:
            logger.info("audit records are written again")
        self._silent = False
        return True

    def _append(self, topic: TopicImage, lines: list[tuple[bytes, bytes]]) -> None:
        led = [each for each in self._partitions() if each.topic_partition.topic == topic.name and each.leads]
        dropped = self._dropped
        told = {"time_ms": self._now_ms(), "node": self._node_id, "event": "dropped", "left_out": dropped}
        first = [(b"", json.dumps(told).encode())]
        both = [*(first if dropped else []), *lines]
        keys = pa.array([key for key, _ in both], pa.binary())
        columns = Columns(value=pa.array([value for _, value in both], pa.binary()), key=keys)
        refusal: RaftlogError | None = None
        for number in range(len(led)):
            partition = led[(self._turn + number) % len(led)]
            batch = encode_batch(columns, self._now_ms())
            try:
                partition.append(batch, partition.leader_epoch, None, all_replicas=True, checked=parse_header(batch))
            except RaftlogError as error:
                refusal = error
                continue
            self._turn += number + 1
            self._dropped -= dropped
            return
        raise refusal or LeaderNotAvailable(f"this broker leads no partition of {topic.name}")
