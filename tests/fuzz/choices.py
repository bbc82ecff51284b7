"""Decisions read off bytes, so that an engine that knows nothing but bytes can drive a generator.

When the bytes run out every further decision is the first alternative: short inputs are simple, and cutting an input
short simplifies what it stands for. A decision takes whole bytes, so that a changed byte changes few decisions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

_I64: Final = 1 << 63
INTERESTING: Final = (
    *(0, 1, -1, 2, 3, 7, 8, 12, 16, 63, 64, 100, 127, 128, 255, 256, 1000, 4095, 4096, 10_000, 32_767, 32_768, 65_535),
    *(65_536, 1 << 20, (1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 32) - 1, 1 << 32, 1 << 53, _I64 - 1, -_I64, -2),
)
"""Where programs go wrong: around zero, and around the ends of what a field holds."""


class Choices:
    """Reads decisions off `data`, from the first byte on."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        """Bytes that are left."""
        return max(0, len(self._data) - self._at)

    def byte(self) -> int:
        """Return the next byte; 0 behind the end."""
        at = self._at
        self._at += 1
        return self._data[at] if at < len(self._data) else 0

    def take(self, count: int) -> bytes:
        """Return up to so many bytes."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def rest(self) -> bytes:
        """Return everything that is left."""
        return self.take(len(self))

    def below(self, end: int) -> int:
        """Return a number from 0 to before `end`, which is positive."""
        number, reach = self.byte(), 256
        while reach < end:
            number, reach = number << 8 | self.byte(), reach << 8
        return number % end

    def pick(self, items: Sequence[T]) -> T:
        """Return one of them."""
        return items[self.below(len(items))]

    def one_in(self, count: int) -> bool:
        """Whether something happens that happens once in `count` times; never behind the end."""
        return self.byte() % count == count - 1

    def integer(self, low: int = -_I64, high: int = _I64 - 1) -> int:
        """Return a number within the bounds: an interesting one, near one, or any."""
        kind = self.byte() % 4
        if kind == 0:
            return min(max(self.byte() % 16, low), high)
        if kind == 3:
            found = int.from_bytes(self.take(8).ljust(8, b"\0"), "little", signed=True)
        else:
            found = self.pick(INTERESTING) + (self.below(5) - 2 if kind == 2 else 0)
        if low <= found <= high:
            return found
        return low + (found - low) % (high - low + 1) if self.one_in(2) else min(max(found, low), high)

    def blob(self) -> bytes:
        """Return bytes: mostly a few, sometimes many of one."""
        kind = self.byte() % 8
        if kind == 7:
            return bytes([self.byte()]) * self.pick((100, 300, 1_000, 5_000, 70_000))
        return self.take(self.below(24))

    def text(self) -> str:
        """Return a string, sometimes one with characters that need care."""
        kind = self.byte() % 8
        if kind < 4:
            return self.take(self.below(12)).decode("latin-1")
        if kind == 4:
            return self.pick(
                ("", ".", "..", "/", "a/b", "~x", "\0", "\n", "a\nb 1", "ü", "\u2028", "²", "٣", " ", "%s{0}")
            )
        if kind == 5:
            return "x" * self.pick((100, 249, 250, 1_000, 40_000))
        return self.blob().decode("utf-8", "ignore")


def mutate(data: bytes, choices: Choices, limit: int = 1 << 20) -> bytes:
    """Return `data` with up to eight changes of bytes: flips, cuts, doublings, moves, numbers put over it."""
    out = bytearray(data)
    for _ in range(choices.below(8)):
        _change(out, choices)
        del out[limit:]
    return bytes(out)


def _change(out: bytearray, choices: Choices) -> None:
    kind, at = choices.below(10), choices.below(len(out) + 1)
    size = 1 + choices.below(32)
    if kind == 0 and at < len(out):
        out[at] ^= 1 << choices.below(8)
    elif kind == 1 and at < len(out):
        out[at] = choices.byte()
    elif kind == 2:
        del out[at:]
    elif kind == 3:
        del out[at : at + size]
    elif kind == 4:
        out[at:at] = out[at : at + size * 8]
    elif kind == 5:
        out[at:at] = choices.take(size)
    elif kind == 6:
        out[at : at + size] = bytes(min(size, len(out) - at))
    elif kind == 7:
        packing = choices.pick(("<b", "<h", "<i", "<q", ">i", ">q"))
        bits = 8 * struct.calcsize(packing) - 1
        number = struct.pack(packing, choices.integer(-(1 << bits), (1 << bits) - 1))
        out[at : at + len(number)] = number
    elif kind == 8:
        out += choices.pick((b"\0", b"\xff")) * choices.pick((1, 16, 64, 4_096))
    else:
        to = choices.below(len(out) + 1)
        piece = out[at : at + size * 4]
        out[to : to + len(piece)] = piece
