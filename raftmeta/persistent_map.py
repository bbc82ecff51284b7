"""A mapping that is never changed: setting a key makes a new one that shares nearly everything with the old.

    PersistentMap ─ 512 buckets, each a dict of the keys whose CRC-32 falls into it

An image holds up to 100 000 topics and every committed command makes a new image. Copying a dict of that size takes
milliseconds; here a change copies the list of buckets and the dicts that it touches, a few microseconds in all. Keys
spread by CRC-32 and not by `hash`, which differs from process to process, so that the order of iteration is the same
everywhere. It is no order that means anything: sort where order matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar
from zlib import crc32

K = TypeVar("K", bound="str | bytes")
V = TypeVar("V")

BUCKETS = 512
_EMPTY: dict[Any, Any] = {}


class PersistentMap(Mapping[K, V], Generic[K, V]):
    """An immutable mapping from str or bytes; equal to any mapping with the same items.

    Invariants: every key is in the bucket of its CRC-32; the length is the sum of the buckets' lengths. No bucket is
    written to once it belongs to a map.
    """

    __slots__ = ("_buckets", "_length")

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        pairs = items.items() if isinstance(items, Mapping) else items
        self._buckets: list[dict[K, V]] = [_EMPTY] * BUCKETS
        self._length = 0
        builder = MapBuilder(self)
        for key, value in pairs:
            builder[key] = value
        built = builder.build()
        self._buckets, self._length = built._buckets, built._length

    @staticmethod
    def of(items: Mapping[K, V]) -> PersistentMap[K, V]:
        """Return `items` itself where it is such a map, else one with the same items."""
        return items if isinstance(items, PersistentMap) else PersistentMap(items)

    def __getitem__(self, key: K) -> V:
        return self._buckets[_bucket(key)][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, bytes)) and key in self._buckets[_bucket(key)]

    def __iter__(self) -> Iterator[K]:
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)!r})"


class MapBuilder(Generic[K, V]):
    """Changes to a map, under way: a bucket is copied when it is first written to."""

    __slots__ = ("_base", "_buckets", "_length", "_owned")

    def __init__(self, base: PersistentMap[K, V]) -> None:
        self._base = base
        self._buckets = list(base._buckets)
        self._length = base._length
        self._owned: set[int] = set()

    def get(self, key: K) -> V | None:
        """Return the value as it is now."""
        return self._buckets[_bucket(key)].get(key)

    def __getitem__(self, key: K) -> V:
        return self._buckets[_bucket(key)][key]

    def __contains__(self, key: K) -> bool:
        return key in self._buckets[_bucket(key)]

    def __setitem__(self, key: K, value: V) -> None:
        bucket = self._own(_bucket(key))
        self._length -= len(bucket)
        bucket[key] = value
        self._length += len(bucket)

    def pop(self, key: K) -> V:
        """Take a key out and return its value.

        Raises:
            KeyError: it is not there.
        """
        value = self._own(_bucket(key)).pop(key)
        self._length -= 1
        return value

    def build(self) -> PersistentMap[K, V]:
        """Return the map as it is now; the base where nothing was written. The builder is done with."""
        if not self._owned:
            return self._base
        built: PersistentMap[K, V] = PersistentMap.__new__(PersistentMap)
        built._buckets = self._buckets
        built._length = self._length
        self._owned.clear()
        return built

    def _own(self, index: int) -> dict[K, V]:
        if index not in self._owned:
            self._owned.add(index)
            self._buckets[index] = dict(self._buckets[index])
        return self._buckets[index]


def _bucket(key: str | bytes) -> int:
    return crc32(key if isinstance(key, bytes) else key.encode()) % BUCKETS
