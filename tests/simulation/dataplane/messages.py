"""What clients ask of a broker, and what it answers; errors are values."""

from __future__ import annotations

from dataclasses import dataclass

from raftlog.errors import RaftlogError
from raftlog.format import BatchHeader

PartitionKey = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class Produce:
    """Append a batch; `all_replicas`: acks=all, else acks=1."""

    key: PartitionKey
    leader_epoch: int
    batch: bytes
    header: BatchHeader
    all_replicas: bool


@dataclass(frozen=True, slots=True)
class Produced:
    """It is held as asked, from `base_offset` on."""

    base_offset: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read committed records from `offset` on; `from_follower`: a replica in sync will do (KIP-392)."""

    key: PartitionKey
    leader_epoch: int
    offset: int
    from_follower: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """Whole batches, perhaps none."""

    records: bytes
    next_offset: int
    high_watermark: int
    log_start_offset: int


@dataclass(frozen=True, slots=True)
class DeleteRecords:
    """Delete what lies below; -1: below the high watermark."""

    key: PartitionKey
    before_offset: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Refused, or it is not known whether it was done."""

    error: RaftlogError


Request = Produce | Fetch | DeleteRecords
Answer = Produced | Fetched | Failed


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on a connection."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the request of this number."""

    number: int
    answer: Answer
