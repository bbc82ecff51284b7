"""HTTP/2 by hand (RFC 9113): frames of a client that follows no rule of gRPC, and the server's grants."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
"""Kinds of frames."""
ACK, END_STREAM, END_HEADERS = 1, 1, 4
"""Flags."""
INITIAL_WINDOW_SIZE: Final = 4
"""A setting."""


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """Return a frame (section 4.1)."""
    return len(body).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + body


def headers(method: str, stream: int) -> bytes:
    """Return the frame that begins a call."""

    def field(name: bytes, value: bytes) -> bytes:  # RFC 7541, section 6.2.2: literal, not indexed, not Huffman's
        return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value

    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": method.encode(),
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    return frame(HEADERS, END_HEADERS, stream, b"".join(field(name, value) for name, value in fields.items()))


class Frames:
    """A connection that begins calls, and counts how much data of each the server lets it send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int | None = None) -> None:
        """`window`: how much of each answer is taken; None: as much as HTTP/2 grants by default, 65,535 bytes."""
        self._reader = reader
        self._writer = writer
        self._pinged = 0
        self.initial_window = 65_535
        self.granted: Counter[int] = Counter()
        """By stream, beyond the initial window."""
        self.pings = 0
        """Of the server."""
        settings = b"" if window is None else INITIAL_WINDOW_SIZE.to_bytes(2) + window.to_bytes(4)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0, b""))

    def announce(self, method: str, stream: int, size_bytes: int) -> None:
        """Begin a call with a message of this length, of which nothing is sent yet."""
        self._writer.write(headers(method, stream) + frame(DATA, 0, stream, b"\0" + size_bytes.to_bytes(4)))

    def ask(self, method: str, stream: int, request: bytes) -> None:
        """Make a unary call whose request fits into a frame."""
        message = b"\0" + len(request).to_bytes(4) + request
        self._writer.write(headers(method, stream) + frame(DATA, END_STREAM, stream, message))

    def take(self, stream: int, size: int) -> None:
        """Take so many bytes more of an answer."""
        for each in (0, stream):
            self._writer.write(frame(WINDOW_UPDATE, 0, each, size.to_bytes(4)))

    def send(self, stream: int, data: bytes) -> None:
        """Send a piece of the message."""
        self._writer.write(frame(DATA, 0, stream, data))

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def settle(self) -> None:
        """Return once the server has handled all that was sent."""
        self._pinged += 1
        said = self._pinged.to_bytes(8)
        self._writer.write(frame(PING, 0, 0, said))
        while await self.read() != (PING, ACK, said):
            pass

    async def read(self) -> tuple[int, int, bytes]:
        """Read the server's next frame; return its kind, flags and content."""
        head = await self._reader.readexactly(9)
        body = await self._reader.readexactly(int.from_bytes(head[:3]))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
        if kind == WINDOW_UPDATE:
            self.granted[stream] += int.from_bytes(body)
        elif kind == PING and not flags & ACK:
            self.pings += 1
            self._writer.write(frame(PING, ACK, 0, body))
        elif kind == SETTINGS and not flags & ACK:
            for place in range(0, len(body), 6):
                if int.from_bytes(body[place : place + 2]) == INITIAL_WINDOW_SIZE:
                    self.initial_window = int.from_bytes(body[place + 2 : place + 6])
        return kind, flags, body
