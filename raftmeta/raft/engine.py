"""PySyncObj, the Raft engine: checked against the version it was studied in, and with three things replaced.

At import:

- The version, and every private name that this package reads, writes or overrides, must be there. PySyncObj promises
  nothing about them, so another version is refused until it has been read again.
- `createJournal` accepts a journal object, so that the write-ahead log takes the place of PySyncObj's own file.
- Nothing is pickled or unpickled: `pickle` refuses in every module of PySyncObj that had it. PySyncObj's own
  snapshot files are not used; their atomic replacement, which does not sync, refuses as well.
- `createPoller` makes a poller without a file descriptor: nothing here waits on sockets of PySyncObj's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pysyncobj.journal as _journal
import pysyncobj.serializer as _serializer
import pysyncobj.syncobj as _syncobj
import pysyncobj.tcp_connection as _tcp_connection
from pysyncobj import SyncObj
from pysyncobj.version import VERSION as FOUND_VERSION

PYSYNCOBJ_VERSION = "0.3.17"

_METHODS = (
    "__applyLogEntries",
    "__generateRaftTimeout",
    "__onBecomeLeader",
    "__onMessageReceived",
    "__onNodeConnected",
    "__onNodeDisconnected",
    "__sendAppendEntries",
    "__sendNextNodeIdx",
    "__setCurrentTerm",
    "__setState",
    "__tryLogCompaction",
    "_checkCommandsToApply",
    "_getLeader",
    "_isLeader",
    "_onTick",
)
"""Called or overridden, most of them by their mangled names."""
_ATTRIBUTES = (
    "__lastResponseTime",
    "__newAppendEntriesTime",
    "__raftCommitIndex",
    "__raftCurrentTerm",
    "__raftElectionDeadline",
    "__raftLastApplied",
    "__raftLeader",
    "__raftMatchIndex",
    "__raftState",
    "__transferInProgress",
    "__votedForNodeId",
)
"""Set by `SyncObj.__init__` and used here."""


def _mangled(name: str) -> str:
    return f"_SyncObj{name}" if name.startswith("__") else name


def missing_internals(engine: type = SyncObj) -> list[str]:
    """Return what this package relies on and `engine` does not have."""
    known = engine.__init__.__code__.co_names  # type: ignore[misc] # a class's __init__, not an instance's
    missing = [name for name in _METHODS if not hasattr(engine, _mangled(name))]
    return missing + [name for name in _ATTRIBUTES if _mangled(name) not in known]


def check_engine(version: str, missing: list[str]) -> None:
    """Refuse an engine that is not the one this package was written for.

    Raises:
        RuntimeError: it is another version, or lacks something.
    """
    if version != PYSYNCOBJ_VERSION:
        raise RuntimeError(
            f"raftlog relies on internals of PySyncObj {PYSYNCOBJ_VERSION} and found {version}; "
            f"install pysyncobj=={PYSYNCOBJ_VERSION}"
        )
    if missing:
        raise RuntimeError(
            f"PySyncObj {version} lacks {', '.join(missing)}, which raftlog relies on; "
            f"reinstall pysyncobj=={PYSYNCOBJ_VERSION}"
        )


class PickleRefused(RuntimeError):
    """PySyncObj came to a place where it would have pickled or unpickled something."""


class _NoPickle:
    """Takes the place of `pysyncobj.pickle`."""

    @staticmethod
    def _refuse(*args: object, **kwargs: object) -> NoReturn:
        raise PickleRefused("nothing in raftlog is pickled")

    load = loads = dump = dumps = to_bytes = _refuse


class _NoPoller:
    """Waits for nothing."""

    def subscribe(self, descriptor: object, callback: object, event_mask: object) -> None:
        raise AssertionError("PySyncObj opens no sockets here")

    def unsubscribe(self, descriptor: object) -> None:
        raise AssertionError("PySyncObj opens no sockets here")

    def poll(self, timeout: float) -> None:
        """Return at once."""


def _refuse_replace(old_path: str, new_path: str) -> NoReturn:
    raise RuntimeError("snapshots are written by raftmeta.raft.snapshots only")


def _install() -> None:
    create_journal = _syncobj.createJournal

    def journal_or_file(journal: object = None) -> object:
        return journal if isinstance(journal, _journal.Journal) else create_journal(journal)

    _syncobj.createJournal = journal_or_file
    _syncobj.createPoller = lambda kind: _NoPoller()
    for module in (_syncobj, _serializer, _tcp_connection):
        module.pickle = _NoPickle
    _journal.loads = _journal.dumps = _journal.to_bytes = _NoPickle._refuse
    _serializer.atomicReplace = _refuse_replace


check_engine(FOUND_VERSION, missing_internals())
_install()


def monotonic_s() -> float:
    """Return PySyncObj's own clock: what is compared with its deadlines must come from it.

    On Linux that is CLOCK_MONOTONIC_RAW, which drifts away from `time.monotonic` by milliseconds an hour.
    """
    now: float = _syncobj.monotonicTime()
    return now


def use_clock(clock: Callable[[], float]) -> Callable[[], float]:
    """Make every node of this process run on `clock`, for simulation; returns the clock that was in use."""
    previous: Callable[[], float] = _syncobj.monotonicTime
    _syncobj.monotonicTime = clock
    return previous
