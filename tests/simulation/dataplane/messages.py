"""What clients ask of a broker, and what it answers; errors are values."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from broker.log.transactions import AbortedTransaction
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


@dataclass(frozen=True, slots=True)
class FetchStable:
    """Read records below the last stable offset, from `offset` on (read_committed)."""

    key: PartitionKey
    leader_epoch: int
    offset: int
    from_follower: bool = False


@dataclass(frozen=True, slots=True)
class FetchedStable:
    """Whole batches, perhaps none, and the aborted transactions that they may be of."""

    records: bytes
    next_offset: int
    last_stable_offset: int
    leader_epoch: int
    aborted: tuple[AbortedTransaction, ...]


@dataclass(frozen=True, slots=True)
class Rpc:
    """A call of the services `Transaction` and `Group`, by the method's name."""

    method: str
    message: Message


@dataclass(frozen=True, slots=True)
class Replied:
    """The service's result."""

    message: Message


Request = Produce | Fetch | DeleteRecords | FetchStable | Rpc
Answer = Produced | Fetched | Failed | FetchedStable | Replied


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
