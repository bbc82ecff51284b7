"""Planted bugs: a check taken out of the real code, and the target that has to notice.

Code is replaced within the function itself, so that whoever has imported it meets the bug as well. There is an input
that shows each (`caught.txt`); where generators have changed so that it shows nothing any more, others are tried.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

from tests.fuzz.engines import LARGEST
from tests.fuzz.minimise import failure
from tests.fuzz.registry import TARGETS
from tests.simulation.mutations import Rewrite

CAUGHT: Final = Path(__file__).with_name("caught.txt")
"""A planted bug and an input in each line, with a tab between."""
FIRST_ATTEMPTS: Final = 20
"""With the input that is known: a stream is listened to for so short a time that its answer may come later."""
SIZES: Final = (4, 12, 30, 60, 150, 300, LARGEST)


@dataclass(frozen=True)
class Plant:
    """A bug, and the target that finds it."""

    target: str
    rewrites: tuple[Rewrite, ...]
    inputs: int = 3_000
    """Within so many random ones."""
    alone: bool = False
    """Needs a new process: Arrow reports its peak of memory since the start, so an earlier peak would hide this one."""


def _one(target: str, where: str, old: str, new: str, **more: Any) -> Plant:
    return Plant(target, (Rewrite(where, old, new),), **more)


def _uncaught(target: str, where: str, caught: str) -> Plant:
    """An exception that is not turned into a refusal."""
    return _one(target, where, f"except {caught}", "except ZeroDivisionError")


PLANTS: Final[dict[str, Plant]] = {
    "the checksum of a batch is ignored": _one(
        "batch", "raftlog.format.batch:parse_batch", "if actual != header.crc32c:", "if False:"
    ),
    "no bound on the number of records": _one(
        "batch",
        "raftlog.format.header:check_header",
        "if header.record_count > span or (not sparse and header.record_count != span):",
        "if False:",
    ),
    "a batch inflates without a bound": Plant(
        "batch",
        (
            Rewrite(
                "raftlog.format.compression:InflateLimits.refusal", "if inflated_size > self.max_bytes:", "if False:"
            ),
            Rewrite(
                "raftlog.format.compression:InflateLimits.refusal",
                "if inflated_size > self.ratio_floor_bytes and",
                "if False and",
            ),
        ),
        alone=True,
    ),
    "a batch inflates beyond what it claims": _one(
        "batch",
        "raftlog.format.compression:inflate",
        "stream.read_buffer(inflated_size + 1)",
        "stream.read_buffer(1 << 30)",
        alone=True,
    ),
    "offsets within a small batch are not checked": _one(
        "small-batch",
        "raftlog.format.small_batch:is_of_few",
        "if ends[0] != 0 or list(ends) != sorted(ends):",
        "if False:",
    ),
    "the end of an aborted range is exclusive": _one(
        "aborted",
        "raftlog.format.aborted:AbortedRanges.hold",
        "base_offset <= ranges[number][1]",
        "base_offset < ranges[number][1]",
    ),
    "a field may reach beyond the message": _one(
        "wire", "raftlog.format.wire:_cut_some", "if position > end:", "if False:"
    ),
    "what surrounds the frames is not read": _one(
        "wire", "raftlog.format.wire:decode_replicate", "if head:", "if False:"
    ),
    "the checksum of a checkpoint is ignored": _one(
        "log-lines", "broker.log.log_dir:decode_lines", "if counts !=", "if False and counts !="
    ),
    "a checkpoint may hold any number": _one(
        "log-lines", "broker.log.log_dir:_number", "if not _is_number(text):", "if False:"
    ),
    "lines that say nothing are no damage": _one(
        "producer-snapshots",
        "broker.log.producer_state:decode_snapshot",
        "with contradictions(path):",
        "if True:",
    ),
    "an index may go back": _one(
        "log-indexes",
        "broker.log.segment:_agreeing_entries",
        "return count if good.all() else int(np.argmin(good))",
        "return count",
    ),
    "an index entry is not checked": _one(
        "log-recovery",
        "broker.log.index:open_entries",
        "return entries if good.all() else entries[: int(np.argmin(good))]",
        "return entries",
    ),
    "an epoch beyond the last one has no end": _one(
        "leader-epochs",
        "replication.leader_epochs:LeaderEpochCache.end_offset_for",
        "self._starts[index] if index < len(self._starts) else log_end_offset",
        "self._starts[index]",
    ),
    "recovery cuts off what was committed": Plant(
        "log-recovery",
        (
            Rewrite("broker.log.recovery:_Recovery._scan", "if expected < self.safe_end:", "if False:"),
            Rewrite("broker.log.recovery:_Recovery._scan_all", "if segment.next_offset < self.safe_end:", "if False:"),
        ),
    ),
    "recovery skips a damaged batch in the middle": _one(
        "log-recovery",
        "broker.log.recovery:_Recovery._scan",
        "if header.base_offset != expected:",
        "if header.base_offset < expected:",
    ),
    "the end of a sealed segment is not compared": _one(
        "log-recovery",
        "broker.log.recovery:_Recovery._check_sealed",
        'if (int(entry["relative_offset"]), int(entry["position"])) == closing:',
        "if True:",
    ),
    "a damaged index of transactions is taken": Plant(
        "log-recovery",
        (  # only both of them: an index that was cut off has no closing entry
            Rewrite(
                "broker.log.index:TxnIndex.load",
                "if len(rows) * TXN_ENTRY_BYTES != len(data) or not len(rows):",
                "if not len(rows):",
            ),
            Rewrite(
                "broker.log.index:TxnIndex.load",
                "if closing[:3] != (_CLOSING_ID, base_offset, next_offset):",
                "if False:",
            ),
        ),
    ),
    "the scrub does not look where batches begin": _one(
        "log-recovery",
        "broker.log.segment:check_piece",
        "if header.base_offset != expected:",
        "if False:",
    ),
    "the checksum of the metadata log is ignored": _one(
        "metadata-recovery",
        "raftmeta.raft.wal:Segment._payload_at",
        "return payload if google_crc32c.extend(covered, payload) == crc else None",
        "return payload",
    ),
    "a bad frame before a good one is a torn tail": Plant(
        "metadata-recovery",
        (
            Rewrite(
                "raftmeta.raft.wal:Segment.split",
                "if self._payload_at(data, later, None) is not None:",
                "if False:",
            ),
            Rewrite("raftmeta.raft.wal:read_log", "if at < len(firsts) - 1 and", "if False and"),
        ),
        inputs=15_000,
    ),
    "a record may be longer than its frame": _uncaught(
        "metadata-formats", "raftmeta.raft.wal:split_records", "struct.error"
    ),
    "a snapshot that contradicts itself": _uncaught(
        "metadata-state", "raftmeta.state:MetadataState.decode", "(AssertionError, KeyError)"
    ),
    "an entry that does not parse": _uncaught("metadata-commands", "raftmeta.state:MetadataState.apply", "DecodeError"),
    "entries may have gaps": _one(
        "raft-messages", "raftmeta.raft.messages:_flaw_in_entries", "if entry.index != index + 1:", "if False:"
    ),
    "entries may be empty": _one(
        "raft-messages", "raftmeta.raft.messages:_flaw_in_entries", "if not entry.data:", "if False:"
    ),
    "a hello of any term": _one(
        "raft-hello", "raftmeta.quorum.hello:refusal", "if theirs.current_term > MAX_TERM:", "if False:"
    ),
    "an error of a partition ends the call": _uncaught(
        "calls", "broker.net.services.log:LogService._each", "RaftlogError"
    ),
    "a bad fetch request ends in a traceback": _one(
        "streams",
        "broker.net.services.log:LogService._stream",
        "except InvalidRequestError",
        "except ZeroDivisionError",
    ),
    "a follower's log may begin below 0": _one(
        "replica-follower",
        "broker.partition.follower_term:Following._check_beginning",
        "if 0 <= first.base_offset < log.log_end_offset < first.next_offset:",
        "if first.base_offset < log.log_end_offset < first.next_offset:",
    ),
    "a leader may send another leader's epoch": _one(
        "replica-follower",
        "broker.log.partition_log:PartitionLog._append_run",
        "if max_epoch is not None and header.leader_epoch > max_epoch:",
        "if False:",
    ),
    "a stream that is over stays open": _one(
        "replica-leader", "replication.leader_session:LeaderSession.close", "self._queue.close()", "pass"
    ),
    "a configuration as deep as one likes": _uncaught(
        "server-config", "raftlog.config:ConfigDef.from_toml", "RecursionError"
    ),
    "a number of any size": _one(
        "cli-inputs", "raftlog.cli.records.produce:_json_integer", "if -1 << bits <= value < 1 << bits:", "if True:"
    ),
    "an index file may end within an entry": _one(
        "cli-segments", "raftlog.cli.records.log_dump:_entries", "if len(raw) < entry.size:", "if False:"
    ),
    "a Kafka request may end anywhere": _one(
        "kafka-requests",
        "broker.kafka.codec:Message.decode",
        "except (struct.error, UnicodeDecodeError)",
        "except ZeroDivisionError",
    ),
    "records of a Kafka batch that do not decode": _one(
        "kafka-batches",
        "broker.kafka.record_batches:_slices",
        "except (CorruptRecordException, ValueError, OverflowError, MemoryError, TypeError)",
        "except ZeroDivisionError",
    ),
    "a Kafka client that has not logged in may send anything": _one(
        "kafka-authentication", "broker.kafka.sasl:Session.check_request", "if not authenticates:", "if False:"
    ),
    "a Kafka client's malformed request is a bug of the connection": _one(
        "kafka-connections",
        "broker.kafka.listener:_Connection._handle",
        'raise _Closed(f"a malformed request: {error}") from None',
        "raise KeyError(str(error)) from None",  # `_read` takes an InvalidRequestError for a request beyond a bound
    ),
    "a group's record with impossible contents": _one(
        "group-records",
        "broker.coordinator.groups.records:replay",
        "except (DecodeError, ValueError)",
        "except DecodeError",
    ),
    "a transaction's record with impossible contents": _one(
        "transaction-records",
        "broker.coordinator.transactions.records:parse_transaction",
        "except (DecodeError, ValueError)",
        "except DecodeError",
    ),
}


@contextlib.contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Have the bug in the code for a while."""
    undo: list[tuple[Any, CodeType]] = []
    try:
        for function, code in _rewritten(plant):
            undo.append((function, function.__code__))
            function.__code__ = code
        yield
    finally:
        for function, code in reversed(undo):
            function.__code__ = code


def _rewritten(plant: Plant) -> Iterator[tuple[Any, CodeType]]:
    """Yield functions with the code that they are to have; one that is rewritten twice comes once."""
    sources: dict[Any, str] = {}
    for rewrite in plant.rewrites:
        function = _function(rewrite.target)
        source = sources.get(function) or textwrap.dedent(inspect.getsource(function))
        if source.count(rewrite.old) != 1:
            raise LookupError(f"{rewrite.target} has {source.count(rewrite.old)} times {rewrite.old!r}")
        sources[function] = source.replace(rewrite.old, rewrite.new)
    for function, source in sources.items():
        source = source.removeprefix("@staticmethod\n")
        flags = __future__.annotations.compiler_flag
        scope: dict[str, Any] = {}
        exec(
            compile(source, f"<{function.__qualname__}>", "exec", flags, dont_inherit=True), function.__globals__, scope
        )
        yield function, scope[function.__name__].__code__


def _function(target: str) -> Any:
    module_name, _, path = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    return found.__func__ if isinstance(found, staticmethod) else found


def catch(name: str, first: bytes | None = None) -> tuple[bytes, Exception] | None:
    """Return an input that shows a planted bug, and how; None if there is none among those that were tried."""
    plant = PLANTS[name]
    check = TARGETS[plant.target].check
    TARGETS[plant.target].prepare()
    dice = random.Random(name)
    with planted(plant):
        for _ in range(FIRST_ATTEMPTS if first is not None else 0):
            assert first is not None
            found = failure(check, first)
            if found is not None:
                return first, found
        for _ in range(plant.inputs):
            data = dice.randbytes(dice.choice(SIZES))
            found = failure(check, data)
            if found is not None:
                return data, found
    return None


def catch_alone(name: str) -> bytes | None:
    """As `catch`, in a new interpreter; return the input, for there is no bug in this process to show how it fails."""
    command = [sys.executable, "-m", __name__, name]
    ran = subprocess.run(command, cwd=CAUGHT.parents[2], capture_output=True, text=True, timeout=600, check=True)
    return bytes.fromhex(ran.stdout) if ran.stdout else None


def known_inputs() -> dict[str, bytes]:
    """Return the input that is known for each planted bug."""
    lines = CAUGHT.read_text().splitlines() if CAUGHT.exists() else []
    return {name: bytes.fromhex(digits) for name, _, digits in (line.partition("\t") for line in lines)}


if __name__ == "__main__":
    shown = catch(sys.argv[1], known_inputs().get(sys.argv[1]))
    print("" if shown is None else shown[0].hex(), end="")
