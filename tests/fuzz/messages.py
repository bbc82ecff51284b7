"""Protobuf messages of any type: structurally valid, with values that are plausible, impossible, or much too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from raftlog.v1 import (  # every file, so that the pool knows all services
    admin_pb2,
    common_pb2,
    controller_pb2,
    group_pb2,
    group_records_pb2,
    log_pb2,
    metadata_pb2,
    node_pb2,
    raft_pb2,
    records_pb2,
    replication_pb2,
    transaction_pb2,
    transaction_records_pb2,
)
from tests.fuzz.choices import Choices, mutate

MessageT = TypeVar("MessageT", bound=Message)

FILES = (
    *(admin_pb2, common_pb2, controller_pb2, group_pb2, group_records_pb2, log_pb2, metadata_pb2, node_pb2),
    *(raft_pb2, records_pb2, replication_pb2, transaction_pb2, transaction_records_pb2),
)
MAX_DEPTH = 6
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_MANY = (50, 300, 2_000)


@dataclass(frozen=True)
class Known:
    """What exists: values that get past the first check. By name of a field, then by its kind."""

    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    texts: Sequence[str] = ()
    blobs: Sequence[bytes] = ()
    numbers: Sequence[int] = (0, 1, -1)


NOTHING = Known()


def message_of(kind: type[MessageT], choices: Choices, known: Known = NOTHING) -> MessageT:
    """Return a message of this type."""
    message = kind()
    fill(message, choices, known)
    return message


def fill(message: Message, choices: Choices, known: Known = NOTHING, depth: int = 0) -> None:
    """Set about half the fields of a message."""
    fields: list[FieldDescriptor] = list(message.DESCRIPTOR.fields)  # type: ignore[arg-type] # of either implementation
    chosen: dict[str, int] = {}
    for one in message.DESCRIPTOR.oneofs:
        of_it: Any = choices.pick(list(one.fields))
        chosen[one.name] = of_it.number
    for each in fields:
        of_one = each.containing_oneof
        if of_one is not None and len(of_one.fields) > 1 and chosen[of_one.name] != each.number:
            continue
        if choices.byte() % 4 == 3 or (depth >= MAX_DEPTH and each.message_type is not None):
            continue
        if each.is_repeated:
            _fill_repeated(message, each, choices, known, depth)
        elif each.message_type is not None:
            inner = getattr(message, each.name)
            inner.SetInParent()
            fill(inner, choices, known, depth + 1)
        else:
            setattr(message, each.name, _scalar(each, choices, known))


def _fill_repeated(message: Message, each: FieldDescriptor, choices: Choices, known: Known, depth: int) -> None:
    target = getattr(message, each.name)
    many = choices.pick(_MANY) if choices.byte() % 32 == 31 else choices.below(4)
    if each.message_type is not None and each.message_type.GetOptions().map_entry:
        key, value = each.message_type.fields
        for _ in range(min(many, 50)):
            if value.message_type is None:
                target[_scalar(key, choices, known)] = _scalar(value, choices, known)
            else:
                fill(target[_scalar(key, choices, known)], choices, known, depth + 1)
    elif each.message_type is not None:
        if many > 50:  # the same one again and again
            inner = target.add()
            fill(inner, choices, known, depth + 1)
            if inner.ByteSize() < 500:
                target.extend([inner] * many)
            return
        for _ in range(many):
            fill(target.add(), choices, known, depth + 1)
    elif many > 50:
        target.extend([_scalar(each, choices, known)] * (many if each.type != FieldDescriptor.TYPE_STRING else 50))
    else:
        target.extend(_scalar(each, choices, known) for _ in range(many))


def _scalar(each: FieldDescriptor, choices: Choices, known: Known) -> Any:
    named = known.fields.get(each.name)
    if named and choices.byte() % 4 != 3:
        value = choices.pick(named)
        return max(0, value) if each.cpp_type in _UNSIGNED else value
    match each.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return choices.one_in(2)
        case FieldDescriptor.CPPTYPE_ENUM:
            assert each.enum_type is not None
            values = [value.number for value in each.enum_type.values]
            return choices.pick(values) if choices.byte() % 8 != 7 else choices.integer(-(1 << 31), (1 << 31) - 1)
        case FieldDescriptor.CPPTYPE_STRING if each.type == FieldDescriptor.TYPE_STRING:
            return choices.pick(known.texts) if known.texts and choices.byte() % 4 != 3 else choices.text()
        case FieldDescriptor.CPPTYPE_STRING:
            return choices.pick(known.blobs) if known.blobs and choices.byte() % 4 != 3 else choices.blob()
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return choices.pick((0.0, 0.5, -1.0, 1e308, float("inf"), float("nan")))
    bits = 64 if each.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
    unsigned = each.cpp_type in _UNSIGNED
    low, high = (0, (1 << bits) - 1) if unsigned else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    if choices.byte() % 4 == 0:
        return min(max(choices.pick(known.numbers), low), high)
    return choices.integer(low, high)


def encoded(message: Message, choices: Choices) -> bytes:
    """Return the bytes of a message, one time in four with damage in them."""
    data = message.SerializeToString()
    return mutate(data, choices, 1 << 19) if choices.one_in(4) else data


def type_of(descriptor: Descriptor) -> type[Message]:
    """Return the class of a message."""
    return message_factory.GetMessageClass(descriptor)
