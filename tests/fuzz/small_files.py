"""The small files of a log directory, and indexes, each alone: decoders on arbitrary bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from broker.log import log_dir as files
from broker.log.index import TxnIndex, decode_offset_entries, decode_time_entries
from broker.log.producer_state import ProducerLimits, decode_snapshot, encode_producers, load_snapshot
from broker.log.segment import SegmentIndex
from broker.log.storage import Storage
from broker.log.transactions import AbortedTransaction
from replication.leader_epochs import EpochEntry, LeaderEpochCache
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.log_directories import base
from tests.fuzz.oracle import refusals, require
from tests.fuzz.repair import repair, text_lines
from tests.support.memory_storage import MemoryStorage

_LIMITS: Final = ProducerLimits()
_DIRECTORY: Final = "/d"
_TOPIC_ID: Final = "01" * 16
_OFFSETS: Final = [f"{_TOPIC_ID} 0 0 10 10", f"{_TOPIC_ID} 1 3 9 7"]
_META: Final = ["cluster_id c", "node_id 1", f"directory_id {_TOPIC_ID}"]
_Reader = Callable[[Storage, str], object]

_WORDS: Final = (
    "-1",
    "",
    "²",
    "٣",
    "1_0",
    "+1",
    "x",
    "9" * 30,
    "9" * 5_000,
    "0",
    "7",
    "\u2028",
    "a b",
    "a\nb",
    "01" * 16,
)

KINDS: Final[tuple[tuple[str, str, list[str], _Reader], ...]] = (
    (files.OFFSET_CHECKPOINT, "offsets", _OFFSETS, files.load_marks),
    (files.LEADER_EPOCH_CHECKPOINT, "leader-epochs", ["1 0", "4 20"], files.load_leader_epochs),
    (
        files.PARTITION_METADATA,
        "partition",
        [f"topic_id {_TOPIC_ID}", "topic t", "partition 0"],
        files.load_partition_metadata,
    ),
    (files.META_PROPERTIES, "log-dir", _META, files.load_meta_properties),
    (files.CLEAN_SHUTDOWN, "clean-shutdown", ["broker_epoch 7"], files.load_clean_shutdown),
    (files.DAMAGED, "damaged", ["what was", "found"], files.load_damage),
)


def lines_target(data: bytes) -> None:
    """Checkpoints and properties are read exactly, or refused."""
    choices = Choices(data)
    name, kind, lines, read = choices.pick(KINDS)
    written = files.encode_lines(kind, lines)
    content = choices.rest() if choices.one_in(8) else mutate(written, choices)
    forged = choices.one_in(2)
    if forged and choices.one_in(2):
        content = _with_another_word(written, choices)
    if forged:
        content = text_lines(content)
    with refusals():
        found = read(_storage(name, content), _DIRECTORY)
        _check_read(name, found)
        if not forged and found is not None:
            require(found == read(_storage(name, written), _DIRECTORY), "the content was written again, and differs")


def _with_another_word(content: bytes, choices: Choices) -> bytes:
    lines = [line.split(b" ") for line in content.split(b"\n")]
    line = choices.pick([line for line in lines if line != [b""]])
    line[choices.below(len(line))] = choices.pick(_WORDS).encode()
    return b"\n".join(map(b" ".join, lines))


def _storage(name: str, content: bytes) -> MemoryStorage:
    storage = MemoryStorage()
    storage.make_dir(_DIRECTORY)
    storage.open(f"{_DIRECTORY}/{name}", create=True).write((content,), 0)
    return storage


def _check_read(name: str, found: Any) -> None:
    if name == files.OFFSET_CHECKPOINT:
        require(all(min(marks) >= 0 for marks in found.values()), "an offset below 0 was accepted")
    elif name == files.LEADER_EPOCH_CHECKPOINT:
        LeaderEpochCache(found)
    elif name == files.META_PROPERTIES:
        require(
            len(bytes.fromhex(found.directory_id)) == 16,
            f"a directory id was accepted that has not 16 bytes: {found.directory_id}",
        )
    elif name == files.PARTITION_METADATA:
        require(found.partition >= 0, "a partition below 0 was accepted")


def snapshot_target(data: bytes) -> None:
    """Producer snapshots: one that is accepted survives being written again; recovery passes over the others."""
    choices = Choices(data)
    written = [content for path, content in base(True, False).files.items() if path.endswith(".snapshot")]
    content = choices.rest() if choices.one_in(8) else mutate(choices.pick(written), choices)
    if choices.one_in(2):
        content = text_lines(content)
    limits = ProducerLimits(max_ids=1 + choices.below(4)) if choices.one_in(4) else _LIMITS
    with refusals():
        producers, aborted = decode_snapshot("snapshot", content, limits)
        again = decode_snapshot("again", encode_producers(producers, producers.transactions.undecided, aborted), limits)
        require(
            dict(again.producers.items()) == dict(producers.items()), "the producers were written again, and differ"
        )
        require(again.aborted == aborted, "the aborted transactions were written again, and differ")
    storage = _storage(f"{5:020d}.snapshot", content)
    offset, _ = load_snapshot(storage, _DIRECTORY, [5], 10, limits)
    require(offset in (0, 5), f"a snapshot was loaded from offset {offset}, which has none")


def index_target(data: bytes) -> None:
    """Index files: what is taken over ascends, is a prefix, and lies where the file says."""
    choices = Choices(data)
    whole = base(True, False).files
    stem = f"{_DIRECTORY}/{0:020d}"
    storage = MemoryStorage()
    storage.make_dir(_DIRECTORY)
    contents: dict[str, bytes] = {}
    for suffix in (".index", ".timeindex", ".txnindex"):
        written = [content for path, content in whole.items() if path.endswith(suffix)]
        content = choices.blob() if choices.one_in(8) else mutate(choices.pick(written), choices)
        contents[suffix] = repair(stem + suffix, content) if choices.one_in(2) else content
        storage.open(stem + suffix, create=True).write((contents[suffix],), 0)
    require(
        len(decode_offset_entries(0, contents[".index"])) <= len(contents[".index"]) // 12,
        "more offset entries were read than the file can hold",
    )
    require(
        len(decode_time_entries(0, contents[".timeindex"])) <= len(contents[".timeindex"]) // 16,
        "more time entries were read than the file can hold",
    )
    index = SegmentIndex.load(storage, stem, 0)
    entries = index.entries
    require(all(a[0] > 0 for a in entries[:1]), "there is an index entry for the first batch")
    rising = all(a[0] < b[0] and a[1] < b[1] and a[2] <= b[2] for a, b in pairwise(entries))
    require(rising, f"the index entries do not rise: {entries}")
    for offset in (0, 5, 1 << 40):
        require(index.floor(offset).offset <= max(offset, 0), f"the index entry for offset {offset} is behind it")
    with refusals():
        txn_index = TxnIndex.load(storage, stem, 0, choices.pick((4, 9, 16, 1 << 40)))
        if txn_index is not None:
            found = txn_index.lookup(0, 1 << 62)
            require(
                all(isinstance(entry, AbortedTransaction) for entry in found),
                "something other than aborted transactions was read",
            )
            lasts = [entry.last_offset for entry in txn_index.entries]
            require(lasts == sorted(set(lasts)), f"the markers of aborted transactions do not rise: {lasts}")


def epochs_target(data: bytes) -> None:
    """The cache of leader epochs, asked by a peer for anything: an answer lies within the log."""
    choices = Choices(data)
    epoch = offset = 0
    entries = []
    for _ in range(choices.below(8)):
        epoch, offset = epoch + 1 + choices.below(3), offset + 1 + choices.below(9)
        entries.append(EpochEntry(epoch, offset))
    cache, end = LeaderEpochCache(entries), offset + choices.below(9)
    for _ in range(4):
        asked = choices.integer(-(1 << 31), (1 << 31) - 1)
        found = cache.end_offset_for(asked, end)
        if found is not None:
            require(
                found.leader_epoch <= max(asked, -1) or asked < 0,
                f"the epoch found for {asked} is {found.leader_epoch}",
            )
            require(found.end_offset <= end, f"the end {found.end_offset} of an epoch is behind the log end {end}")
