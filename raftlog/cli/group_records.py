"""What a record of __consumer_offsets says, as JSON (raftlog/v1/group_records.proto)."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from raftlog.v1 import group_records_pb2

TOPIC: Final = "__consumer_offsets"
_VALUES: Final[dict[str, type[Message]]] = {
    "offset": group_records_pb2.OffsetValue,
    "group": group_records_pb2.GroupValue,
    "member_id": group_records_pb2.MemberValue,
    "target_of": group_records_pb2.TargetValue,
    "assignment_of": group_records_pb2.AssignmentValue,
    "pending": group_records_pb2.OffsetValue,
    "transaction_of": group_records_pb2.ProducerFenceValue,
}


def readable(key: bytes | None, value: bytes | None) -> dict[str, Any] | None:
    """Return {"key": ..., "value": ...} of a record, the value None for a tombstone; None when it is not to be read.

    Topic ids are hex digits. The key names what it stands for: offset, group, member_id, target_of, assignment_of,
    pending (an offset of a transaction that is open) or transaction_of (a producer id whose transaction has ended).
    """
    try:
        parsed = group_records_pb2.GroupRecordKey.FromString(key or b"")
        kind = parsed.WhichOneof("kind")
        if kind is None:
            return None
        content = None if value is None else as_json(_VALUES[kind].FromString(value))
    except DecodeError:
        return None
    if kind == "offset" and content is not None:
        del content["producer_epoch"]  # of pending ones only
    stands_for = getattr(parsed, kind)
    named = as_json(stands_for) if isinstance(stands_for, Message) else stands_for
    return {"key": {"group_id": parsed.group_id, kind: named}, "value": content}


def as_json(message: Message) -> dict[str, Any]:
    """Return a message by field, also those that are empty or zero; bytes as hex digits."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        content = getattr(message, field.name)
        if field.is_repeated:
            found[field.name] = [_plain(each) for each in content]
        elif field.message_type is not None and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = _plain(content)
    return found


def _plain(content: Any) -> Any:
    if isinstance(content, Message):
        return as_json(content)
    return content.hex() if isinstance(content, bytes) else content
