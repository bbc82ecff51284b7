"""A mapping with changes on top of it that are not made yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Overlay(Mapping[K, V], Generic[K, V]):
    """`base` as it would be with the changes; None takes a key away. The base must not change meanwhile."""

    __slots__ = ("_base", "_changes")

    def __init__(self, base: Mapping[K, V]) -> None:
        self._base = base
        self._changes: dict[K, V | None] = {}

    def set(self, key: K, value: V | None) -> None:
        """Set a key, or take it away."""
        self._changes[key] = value

    def __getitem__(self, key: K) -> V:
        value = self._changes[key] if key in self._changes else self._base.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        if key in self._changes:
            return self._changes[key] is not None
        return key in self._base

    def __iter__(self) -> Iterator[K]:
        for key in self._base:
            if key not in self._changes:
                yield key
        for key, value in self._changes.items():
            if value is not None:
                yield key

    def __len__(self) -> int:
        length = len(self._base)
        for key, value in self._changes.items():
            length += (value is not None) - (key in self._base)
        return length
