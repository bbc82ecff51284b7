"""Producer ids that are bound to their owners (docs/adr/0026). Pure.

    bits 62-24   number   allocated in the quorum, in blocks; no number is given out twice
    bits 23-0    tag      HMAC-SHA256(secret, number and owner), cut to 24 bits

The secret is part of the metadata, so every leader can tell from an id alone whether it belongs to the owner that a
batch names; nothing has to be asked, and nothing is kept for an id that does not. Another owner's id passes as one's
own with a probability of 2^-24, once and for all: the id determines the tag, so repeating the attempt is of no use.

Numbers below `first_number` were given out as ids, unbound, before the cluster had a secret.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, NamedTuple, Self

TAG_BITS: Final = 24
MAX_NUMBER: Final = (1 << 63 - TAG_BITS) - 1
SECRET_BYTES: Final = 32
_TAG: Final = (1 << TAG_BITS) - 1


class ProducerOwner(NamedTuple):
    """The owner of a producer id: a principal's plain producer, a transactional id, or a sink of staged batches."""

    kind: str
    name: str

    @classmethod
    def principal(cls, name: str) -> Self:
        """Return the owner of a producer without transactions."""
        return cls("principal", name)

    @classmethod
    def transactional(cls, transactional_id: str) -> Self:
        """Return a transactional id as the owner, whichever principals use it."""
        return cls("transactional id", transactional_id)

    @classmethod
    def sink(cls, sink_id: str) -> Self:
        """Return a sink as the owner: each of its stages has a producer id."""
        return cls("sink", sink_id)

    def __str__(self) -> str:
        return self.name if self.kind == "principal" else f"{self.kind} {self.name!r}"


class ProducerIdKey(NamedTuple):
    """What producer ids are made and checked with."""

    secret: bytes
    first_number: int

    def bind(self, number: int, owner: ProducerOwner) -> int:
        """Return the producer id of a number for its owner."""
        assert 0 <= number <= MAX_NUMBER
        assert number >= self.first_number, "lower numbers were ids themselves"
        return number << TAG_BITS | self._tag(number, owner)

    def is_bound(self, producer_id: int) -> bool:
        """Whether the id has a tag; one that was given out before the secret existed has none."""
        return producer_id >= self.first_number

    def owns(self, owner: ProducerOwner, producer_id: int) -> bool:
        """Whether the id was bound to this owner."""
        number = producer_id >> TAG_BITS
        return number >= self.first_number and producer_id & _TAG == self._tag(number, owner)

    def _tag(self, number: int, owner: ProducerOwner) -> int:
        message = f"{number} {owner.kind}:{owner.name}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hmac.digest(self.secret, message, hashlib.sha256)[:3], "big")


assert TAG_BITS == 8 * 3, "a tag is three bytes of the hash"
