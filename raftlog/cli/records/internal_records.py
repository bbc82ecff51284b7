"""Records as text and JSON; those of __consumer_offsets and __transaction_state with their decoded content.

The formats are raftlog/v1/group_records.proto and raftlog/v1/transaction_records.proto.
"""

from __future__ import annotations

import base64
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from raftlog._core.descriptions import transaction_state_name
from raftlog.v1 import group_records_pb2, transaction_records_pb2

GROUPS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
_FORMATS: Final[dict[str, tuple[type[Message], dict[str, type[Message]]]]] = {
    GROUPS_TOPIC: (
        group_records_pb2.GroupRecordKey,
        {
            "offset": group_records_pb2.OffsetValue,
            "group": group_records_pb2.GroupValue,
            "member_id": group_records_pb2.MemberValue,
            "target_of": group_records_pb2.TargetValue,
            "assignment_of": group_records_pb2.AssignmentValue,
            "pending": group_records_pb2.OffsetValue,
            "transaction_of": group_records_pb2.ProducerFenceValue,
        },
    ),
    TRANSACTIONS_TOPIC: (
        transaction_records_pb2.TransactionRecordKey,
        {
            "transactional_id": transaction_records_pb2.TransactionValue,
            "sink_id": transaction_records_pb2.SinkValue,
            "stage": transaction_records_pb2.StageValue,
        },
    ),
}
"""For each topic: the format of keys, and the formats of values by the field that is set in the key."""


def readable(topic: str, key: bytes | None, value: bytes | None) -> dict[str, Any] | None:
    """Return {"key": ..., "value": ...} of a coordinator's record; None for others and for undecodable ones.

    The value is None for a tombstone; ids of topics are hex digits. In __consumer_offsets the key also has group_id;
    its field pending is an offset of an open transaction, and transaction_of a producer id whose transaction has ended.
    """
    if topic not in _FORMATS:
        return None
    key_format, value_formats = _FORMATS[topic]
    try:
        parsed: Any = key_format.FromString(key or b"")
        kind = parsed.WhichOneof("kind")
        if kind is None:
            return None
        content = None if value is None else as_json(value_formats[kind].FromString(value))
    except DecodeError:
        return None
    if content is not None and kind == "offset":
        del content["producer_epoch"]  # only pending offsets have it
    if content is not None and topic == TRANSACTIONS_TOPIC and "state" in content:
        content["state"] = transaction_state_name(content["state"])
    named = _plain(getattr(parsed, kind))
    group = {"group_id": parsed.group_id} if topic == GROUPS_TOPIC else {}
    return {"key": {**group, kind: named}, "value": content}


def as_json(message: Message) -> dict[str, Any]:
    """Return a message's fields, including empty and zero ones; bytes as hex digits."""
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


NULL_MARK = "␀"
"""Printed for an absent key or value, because `null` and "" would be different texts."""


def text_of(data: bytes | None) -> str:
    """Return bytes as text: UTF-8, `\\x..` for other bytes, `␀` for None."""
    return NULL_MARK if data is None else data.decode(errors="backslashreplace")


def json_bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return {name: text}, or {name_base64: ...} for bytes that are not UTF-8; `raftlog produce` reads both."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def json_record(
    *, key: bytes | None, value: bytes | None, headers: Any, timestamp_ms: int, offset: int, **place: object
) -> dict[str, object]:
    """Return a record as `--output json` prints it; `place` (topic, partition) comes first."""
    record: dict[str, object] = {**place, "offset": offset, "timestamp": timestamp_ms}
    record |= json_bytes("key", key)
    record |= json_bytes("value", value)
    if headers:
        record["headers"] = [[name, None if data is None else text_of(data)] for name, data in headers]
    return record
