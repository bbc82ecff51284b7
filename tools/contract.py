"""Finds changes of `proto/` that break clients which were built with the released contract.

The released contract is `proto/released.binpb`, a FileDescriptorSet, which `buf breaking --against` reads as well.
`./dev proto --release` writes it anew, once for each release. Until a release has an element, it may still change.

A change breaks the contract if the wire or generated code notices it: an element that is gone (a field or an enum value
may go if its number and its name are reserved), another number, name, type, cardinality, presence or oneof of a field,
another request or response of a method, another streaming, another package or option of a file that names generated
code. Additions break nothing. `buf lint` runs with proto/buf.yaml where a `buf` is on the path.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT: Final = Path(__file__).resolve().parent.parent
RELEASED: Final = ROOT / "proto" / "released.binpb"
_FILE_OPTIONS: Final = (
    "csharp_namespace",
    "go_package",
    "java_multiple_files",
    "java_package",
    "objc_class_prefix",
    "php_namespace",
    "ruby_package",
)

T = TypeVar("T")


def describe() -> FileDescriptorSet:
    """Return the contract of the checkout.

    Raises:
        subprocess.CalledProcessError: protoc refused a file.
    """
    sources = sorted((ROOT / "proto").glob("raftlog/v1/*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "contract"
        command = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", "--include_imports"]
        subprocess.run([*command, f"--descriptor_set_out={target}", *map(str, sources)], check=True)
        return FileDescriptorSet.FromString(target.read_bytes())


def broken() -> list[str]:
    """Return the changes of the checkout that break the released contract."""
    return breaking(FileDescriptorSet.FromString(RELEASED.read_bytes()), describe())


def breaking(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Return the changes from `old` to `new` that break a client which was built with `old`."""
    return list(_files(_ours(old), _ours(new)))


def _ours(contract: FileDescriptorSet) -> list[FileDescriptorProto]:
    return [file for file in contract.file if file.package.startswith("raftlog.")]


def _files(old: list[FileDescriptorProto], new: list[FileDescriptorProto]) -> Iterator[str]:
    for was, now in _pairs(old, new, "file"):
        if now is None:
            yield was
            continue
        before = next(file for file in old if file.name == was)
        for option in _FILE_OPTIONS:
            then, present = getattr(before.options, option), getattr(now.options, option)
            if then != present:
                yield f"{was}: option {option} was {then!r}, is {present!r}"
        if before.package != now.package:
            yield f"{was}: the package was {before.package}, is {now.package}"
    # Elements may move to another file of the package.
    yield from _each(old, new, lambda file: file.message_type, "message", _message)
    yield from _each(old, new, lambda file: file.enum_type, "enum", _enum)
    yield from _each(old, new, lambda file: file.service, "service", _service)


def _each(
    old: Iterable[T], new: Iterable[T], part: Callable[[T], Iterable[Any]], kind: str, compare: Callable[..., Any]
) -> Iterator[str]:
    olds = {each.name: each for holder in old for each in part(holder)}
    for name, now in _pairs(olds.values(), (each for holder in new for each in part(holder)), kind):
        if now is None:
            yield name
        else:
            yield from compare(olds[name], now)


def _pairs(old: Iterable[Any], new: Iterable[Any], kind: str) -> Iterator[tuple[str, Any]]:
    """Yield each old element's name with the new element; for one that is gone, the problem with None."""
    present = {each.name: each for each in new}
    for each in old:
        if each.name in present:
            yield each.name, present[each.name]
        else:
            yield f"{kind} {each.name} is gone", None


def _message(old: DescriptorProto, new: DescriptorProto, prefix: str = "") -> Iterator[str]:
    name = prefix + old.name
    fields = {field.number: field for field in new.field}
    for was in old.field:
        now = fields.get(was.number)
        if now is None:
            reserved = any(each.start <= was.number < each.end for each in new.reserved_range)
            if not reserved or was.name not in new.reserved_name:
                yield f"field {name}.{was.name} = {was.number} is gone; reserve its number and its name"
            continue
        for what, then, present in zip(_TRAITS, _traits(was, old), _traits(now, new), strict=True):
            if then != present:
                yield f"field {name}.{was.name} = {was.number}: its {what} was {then}, is {present}"
    for nested, compare in (("nested_type", _message), ("enum_type", _enum)):
        yield from _each(
            (old,),
            (new,),
            lambda holder, nested=nested: getattr(holder, nested),  # type: ignore[misc] # a default binds it now
            f"{nested} of {name}:",
            lambda was, now, compare=compare: compare(was, now, f"{name}."),
        )


_TRAITS: Final = ("name", "type", "cardinality", "presence", "oneof")


def _traits(field: FieldDescriptorProto, holder: DescriptorProto) -> tuple[str, ...]:
    kind = field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type)
    oneof = holder.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return (
        field.name,
        kind,
        FieldDescriptorProto.Label.Name(field.label),
        "explicit" if field.proto3_optional else "implicit",
        "" if field.proto3_optional else oneof,
    )


def _enum(old: EnumDescriptorProto, new: EnumDescriptorProto, prefix: str = "") -> Iterator[str]:
    values = {value.number: value.name for value in new.value}
    for value in old.value:
        shown = f"value {prefix}{old.name}.{value.name} = {value.number}"
        if value.number not in values:
            reserved = any(each.start <= value.number <= each.end for each in new.reserved_range)
            if not reserved or value.name not in new.reserved_name:
                yield f"{shown} is gone; reserve its number and its name"
        elif values[value.number] != value.name:
            yield f"{shown}: its name is {values[value.number]} now"


def _service(old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    methods = {method.name: method for method in new.method}
    for was in old.method:
        now = methods.get(was.name)
        shown = f"method {old.name}.{was.name}"
        if now is None:
            yield f"{shown} is gone"
            continue
        for field in ("input_type", "output_type", "client_streaming", "server_streaming"):
            then, present = getattr(was, field), getattr(now, field)
            if then != present:
                yield f"{shown}: its {field} was {then}, is {present}"


def release() -> None:
    """Write the checkout's contract as the released one."""
    RELEASED.write_bytes(describe().SerializeToString(deterministic=True))
    print(f"{RELEASED.relative_to(ROOT)} written")
