"""What a record of __transaction_state says, as JSON (raftlog/v1/transaction_records.proto)."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from raftlog._transaction_descriptions import state_name
from raftlog.cli.group_records import as_json
from raftlog.v1 import transaction_records_pb2

TOPIC: Final = "__transaction_state"
_VALUES: Final[dict[str, type[Message]]] = {
    "transactional_id": transaction_records_pb2.TransactionValue,
    "sink_id": transaction_records_pb2.SinkValue,
    "stage": transaction_records_pb2.StageValue,
}


def readable(key: bytes | None, value: bytes | None) -> dict[str, Any] | None:
    """Return {"key": ..., "value": ...} of a record, the value None for a tombstone; None when it is not to be read.

    The key names what it stands for: transactional_id, sink_id or stage.
    """
    try:
        parsed = transaction_records_pb2.TransactionRecordKey.FromString(key or b"")
        kind = parsed.WhichOneof("kind")
        if kind is None:
            return None
        content = None if value is None else as_json(_VALUES[kind].FromString(value))
    except DecodeError:
        return None
    if content is not None and "state" in content:
        content["state"] = state_name(content["state"])
    stands_for = getattr(parsed, kind)
    return {"key": {kind: as_json(stands_for) if isinstance(stands_for, Message) else stands_for}, "value": content}
