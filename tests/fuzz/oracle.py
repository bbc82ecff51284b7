"""What a target may do with any input, and how a violation is found.

    a value            that keeps the promises which the target asserts
    a refusal          an exception of `raftlog.errors` (or what a function documents instead) with something to read
    anything else      a violation: another exception, too much time, too much memory, a promise that does not hold

Time is the processor's, so that a busy machine is no hang; waiting is bounded by the targets that wait. Memory is what
Python and Arrow allocate at most at one time; what escapes both (protobuf) meets `RLIMIT_AS` in the long form.
"""

from __future__ import annotations

import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from zlib import crc32

import pyarrow as pa

from raftlog.errors import RaftlogError

MIB = 1 << 20


class Violation(AssertionError):
    """A promise was broken."""


class Hang(Violation):
    """It took too long."""


def require(holds: object, what: str) -> None:
    """Raise unless it holds."""
    if not holds:
        raise Violation(what)


@contextmanager
def refusals(*others: type[Exception]) -> Iterator[None]:
    """Let refusals pass: those of the project's tree, and `others` that a function documents."""
    try:
        yield
    except RaftlogError as error:
        require(len(str(error)) > 5, f"a refusal gives no reason: {error!r}")
    except others:
        pass


@dataclass(frozen=True)
class Limits:
    """The limits of one input."""

    cpu_s: float = 10.0
    memory_bytes: int = 32 * MIB
    """Beside what the input itself takes, some times over (`PER_BYTE`)."""
    measured_one_in: int = 1
    """Memory is measured for one input in so many, where measuring takes longer than the target."""


PER_BYTE = 64
"""Bytes of memory that a byte of input may cost: an object for each."""


def run_within(target: Callable[[bytes], None], data: bytes, limits: Limits) -> None:
    """Run a target on an input.

    Memory is traced from the first measured input on, for good. To stop would now and then crash CPython 3.11: a thread
    of Arrow that gives a buffer back looks whether there is tracing, waits for the GIL, and notes its allocation in
    tables that are gone by then.

    Raises:
        Violation: a promise was broken, or the input has cost too much.
        Exception: whatever else the target lets through, which is a violation as well.
    """
    if crc32(data) % limits.measured_one_in:
        with _cpu_limit(limits.cpu_s):
            target(data)
        return
    arrow = pa.default_memory_pool()
    held, highest = arrow.bytes_allocated(), arrow.max_memory() or 0
    if not tracemalloc.is_tracing():
        tracemalloc.start(1)
    tracemalloc.clear_traces()
    with _cpu_limit(limits.cpu_s):
        target(data)
    peak = tracemalloc.get_traced_memory()[1]
    now_highest = arrow.max_memory() or 0
    if now_highest > highest:  # else it was less than an earlier input's, which was allowed
        peak += now_highest - held
    allowed = limits.memory_bytes + PER_BYTE * len(data)
    require(peak <= allowed, f"an input of {len(data)} bytes took {peak} bytes of memory, but {allowed} are allowed")


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        raise Hang(f"more than {seconds:g} s of processor time")

    former = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)
