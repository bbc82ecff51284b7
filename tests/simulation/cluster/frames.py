"""What travels between a simulated channel and a simulated server: calls, by number, over one connection.

As HTTP/2 has it: messages of one call keep their order, calls share a connection, and a side sends no more bytes of a
call than the other one has room for. A window may be overdrawn by one message.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

WINDOW_BYTES = 64 << 10
"""How much of a call may be under way, or unread at the other end."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The opener is there."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The acceptor is there: calls may begin."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A call begins; `timeout_s` is what is left of its deadline, None without one."""

    call: int
    method: str
    timeout_s: float | None
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server serves a call, and says so with initial metadata before the first message."""

    call: int
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Data:
    """One message."""

    call: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Room:
    """So many bytes of a call were read: as many more may come."""

    call: int
    size: int


@dataclass(frozen=True, slots=True)
class HalfClose:
    """The caller sends no more."""

    call: int


@dataclass(frozen=True, slots=True)
class Reset:
    """The caller has given up the call."""

    call: int


@dataclass(frozen=True, slots=True)
class End:
    """The call has ended with this status."""

    call: int
    code: grpc.StatusCode
    details: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The channel was closed: all of its calls are over."""


Frame = Hello | Welcome | Begin | Accepted | Data | Room | HalfClose | Reset | End | Goodbye
