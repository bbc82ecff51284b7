"""PySyncObj is checked before it is used."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pysyncobj.syncobj
import pytest
from pysyncobj.version import VERSION

from raftmeta.raft import consensus


def test_the_installed_engine_is_the_one_that_was_studied() -> None:
    assert VERSION == consensus.PYSYNCOBJ_VERSION
    assert consensus.missing_internals() == []


def test_addresses_can_be_written_all_the_same() -> None:
    assert socket.inet_ntop(socket.AF_INET, bytes([127, 0, 0, 1])) == "127.0.0.1"


def test_another_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"found 0\.3\.18; install pysyncobj==0\.3\.17"):
        consensus.check_engine("0.3.18", [])


def test_a_missing_internal_is_named() -> None:
    class Stripped:
        def __init__(self) -> None:
            self._SyncObj__raftLeader = None

    missing = consensus.missing_internals(Stripped)
    assert "__onMessageReceived" in missing
    assert "__raftCommitIndex" in missing
    assert "__raftLeader" not in missing
    with pytest.raises(RuntimeError, match="lacks __onMessageReceived"):
        consensus.check_engine(VERSION, ["__onMessageReceived"])


def test_the_clock_is_the_engines_own() -> None:
    clock: Callable[[], float] = lambda: 42.0  # noqa: E731 # compared by identity below
    previous = consensus.use_clock(clock)
    try:
        assert consensus.monotonic_s() == 42.0
        assert pysyncobj.syncobj.monotonicTime is clock
    finally:
        assert consensus.use_clock(previous) is clock


def test_no_file_descriptor_is_opened() -> None:
    poller = pysyncobj.syncobj.createPoller("auto")
    poller.poll(1.0)
    with pytest.raises(AssertionError):
        poller.subscribe(0, None, 1)
