"""What breaks clients of the released wire contract is found; what adds to it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from tools import contract


def base() -> FileDescriptorSet:
    """Return a contract with one of everything."""
    file = FileDescriptorProto(name="a.proto", package="raftlog.v1", syntax="proto3")
    file.options.go_package = "raftlog/v1;raftlogv1"
    message = file.message_type.add(name="Request")
    optional = FieldDescriptorProto.LABEL_OPTIONAL
    message.field.add(name="topic", number=1, type=FieldDescriptorProto.TYPE_STRING, label=optional)
    message.field.add(name="count", number=2, type=FieldDescriptorProto.TYPE_INT32, label=optional)
    message.enum_type.add(name="Kind").value.add(name="PLAIN", number=0)
    file.message_type.add(name="Response")
    code = file.enum_type.add(name="ErrorCode")
    code.value.add(name="NONE", number=0)
    code.value.add(name="BAD", number=1)
    file.service.add(name="Log").method.add(
        name="Read", input_type=".raftlog.v1.Request", output_type=".raftlog.v1.Response"
    )
    return FileDescriptorSet(file=[file])


def changed(change: Callable[[FileDescriptorProto], object]) -> list[str]:
    new = base()
    change(new.file[0])
    return contract.breaking(base(), new)


def retype(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].type = FieldDescriptorProto.TYPE_BYTES


def repeat(file: FileDescriptorProto) -> None:
    file.message_type[0].field[1].label = FieldDescriptorProto.LABEL_REPEATED


def present(file: FileDescriptorProto) -> None:
    file.message_type[0].field[1].proto3_optional = True
    file.message_type[0].field[1].oneof_index = 0
    file.message_type[0].oneof_decl.add(name="_count")


def into_oneof(file: FileDescriptorProto) -> None:
    file.message_type[0].oneof_decl.add(name="what")
    file.message_type[0].field[1].oneof_index = 0


def renumber(file: FileDescriptorProto) -> None:
    file.message_type[0].field[1].number = 3


def remove_field(file: FileDescriptorProto) -> None:
    del file.message_type[0].field[1]


def remove_and_reserve(file: FileDescriptorProto) -> None:
    remove_field(file)
    file.message_type[0].reserved_range.add(start=2, end=3)
    file.message_type[0].reserved_name.append("count")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (retype, "its type was TYPE_STRING, is TYPE_BYTES"),
        (repeat, "its cardinality was"),
        (present, "its presence was implicit, is explicit"),
        (into_oneof, "its oneof was , is what"),
        (renumber, "Request.count = 2 is gone; reserve"),
        (remove_field, "Request.count = 2 is gone; reserve"),
        (lambda file: setattr(file.message_type[0].field[0], "name", "subject"), "its name was topic, is subject"),
        (lambda file: file.message_type.pop(1), "message Response is gone"),
        (lambda file: file.message_type[0].enum_type.pop(), "of Request: Kind is gone"),
        (lambda file: file.enum_type[0].value.pop(), "ErrorCode.BAD = 1 is gone"),
        (lambda file: setattr(file.enum_type[0].value[1], "name", "WORSE"), "its name is WORSE now"),
        (lambda file: file.service.pop(), "service Log is gone"),
        (lambda file: file.service[0].method.pop(), "method Log.Read is gone"),
        (lambda file: setattr(file.service[0].method[0], "server_streaming", True), "server_streaming was False"),
        (lambda file: setattr(file.service[0].method[0], "output_type", ".raftlog.v1.Request"), "output_type was"),
        (lambda file: setattr(file.options, "go_package", "x"), "option go_package was"),
        (lambda file: setattr(file, "name", "b.proto"), "file a.proto is gone"),
    ],
)
def test_what_breaks_clients_is_found(change: Callable[[FileDescriptorProto], object], words: str) -> None:
    problems = changed(change)
    assert any(words in problem for problem in problems), problems


def add_everywhere(file: FileDescriptorProto) -> None:
    file.message_type[0].field.add(name="more", number=9, type=FieldDescriptorProto.TYPE_BOOL, label=1)
    file.message_type.add(name="Other")
    file.enum_type[0].value.add(name="NEW", number=7)
    file.service[0].method.add(name="Write", input_type=".raftlog.v1.Request", output_type=".raftlog.v1.Response")


@pytest.mark.parametrize("change", [lambda file: None, add_everywhere, remove_and_reserve])
def test_what_adds_or_reserves_breaks_nothing(change: Callable[[FileDescriptorProto], object]) -> None:
    assert changed(change) == []


def test_the_checkout_keeps_the_released_contract() -> None:
    assert contract.broken() == []
    assert len(FileDescriptorSet.FromString(contract.RELEASED.read_bytes()).file) > 10
