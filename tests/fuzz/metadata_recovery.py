"""Starting a controller on a damaged metadata directory: it has what it had, or it does not start and says why.

What a crash tears lies at the end of the last file; damage there, from some frame on, cannot be told from that, so a
controller goes on without it, and so it does when the last file has gone as a whole. Any other damage to what was
durable is a refusal.
"""

from __future__ import annotations

import logging
import struct
from typing import Final

from google.protobuf.message import DecodeError

from raftlog.errors import InternalError, RaftlogError
from raftlog.v1.records_pb2 import MetadataSnapshot
from raftmeta.raft.snapshots import decode_snapshot
from raftmeta.raft.voters import parse_properties
from raftmeta.raft.wal import FRAME_OVERHEAD_BYTES, HEADER_BYTES, Segment, split_records, torn_entries
from raftmeta.state import MetadataState
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.messages import message_of
from tests.fuzz.metadata_directories import DIRECTORY_ID, Controller, Directory, directory, disk_of, small_files
from tests.fuzz.oracle import refusals, require
from tests.fuzz.repair import metadata_snapshot
from tests.fuzz.storages import damage

_LENGTH: Final = struct.Struct("<4sI")


def repair(name: str, data: bytes) -> bytes:
    """Return a file of the directory with its checksums made good."""
    if name.startswith("raft-snapshot-"):
        return metadata_snapshot(data)
    rest = name.removeprefix("wal-")
    return wal_file(data, int(rest) % (1 << 64)) if rest.isdecimal() and name != rest else data


def wal_file(data: bytes, first: int) -> bytes:
    """Return a file of the log whose header and frames check, as far as one frame leads to the next."""
    segment = Segment(DIRECTORY_ID.bytes, first)
    out, position, sequence = [segment.header], HEADER_BYTES, first
    while position + FRAME_OVERHEAD_BYTES <= len(data):
        magic, length = _LENGTH.unpack_from(data, position)
        end = position + FRAME_OVERHEAD_BYTES + length
        if magic != b"RLWF" or end > len(data) or sequence >= 1 << 64:
            break
        out.append(segment.frame(sequence, data[position + FRAME_OVERHEAD_BYTES : end]))
        position, sequence = end, sequence + 1
    return b"".join(out) + data[position:]


def target(data: bytes) -> None:
    """Damage the directory, start a controller, let it go on, start it once more."""
    logging.disable(logging.CRITICAL)
    try:
        with small_files():
            _run(Choices(data))
    finally:
        logging.disable(logging.NOTSET)


def _run(choices: Choices) -> None:
    whole = directory()
    files = {"/" + name: data for name, data in whole.files.items()}
    done = damage(files, choices, (lambda path, data: repair(path[1:], data)) if choices.one_in(2) else None, most=3)
    try:
        _start_and_check(whole, {path[1:]: data for path, data in done.files.items()}, done.forged)
    except Exception as error:
        error.add_note("; ".join(done.log))
        raise


def _start_and_check(whole: Directory, files: dict[str, bytes], forged: bool) -> None:
    disk = disk_of(files)
    with refusals():
        try:
            controller = Controller(disk)
            controller.step(6)
        except InternalError as error:
            require(
                error.__cause__ is None,
                f"the refusal came from an exception that the code does not expect: {error.__cause__!r}",
            )
            raise
        if not files.keys() & whole.files.keys():
            return  # nothing is left: a new directory
        index, image = controller.state.last_applied, controller.state.image
        if not forged:
            known = [each for each in whole.images if whole.images[each].offset == image.offset]
            require(known, f"the recovered image has offset {image.offset}, which no image had")
            require(
                _same(image, whole.images[known[0]]),
                f"the recovered image at offset {image.offset} is not the one that was there",
            )
            if max(whole.files.keys() & files.keys()) == max(whole.files):  # the newest file has not gone as a whole
                require(
                    index >= whole.sealed_index,
                    f"the log ends at entry {index}, but entries up to {whole.sealed_index} must be kept",
                )
        controller.directory.disk.close()
        again = Controller(disk)
        again.step(6)
        require(
            again.state.last_applied >= index, f"a restart went back from entry {index} to {again.state.last_applied}"
        )
        require(_same(again.state.image, image), "a restart gives another image")


def _same(one: object, other: object) -> bool:
    records = [[r.SerializeToString(deterministic=True) for r in image.to_records()] for image in (one, other)]  # type: ignore[attr-defined] # images
    return records[0] == records[1]


def formats_target(data: bytes) -> None:
    """The decoders of that directory, each alone: frames, records, snapshots, properties, states."""
    choices = Choices(data)
    whole = directory()
    name = choices.pick(sorted(whole.files))
    content = choices.rest() if choices.one_in(8) else mutate(whole.files[name], choices)
    if choices.one_in(2):
        content = repair(name, content)
    with refusals():
        payloads, end = Segment(DIRECTORY_ID.bytes, choices.below(40)).split(content, "where")
        require(end <= len(content), f"an entry ends at byte {end} of {len(content)}")
        for payload in payloads:
            list(split_records(payload, "where"))
    payload = (
        choices.rest() if choices.one_in(2) else content[HEADER_BYTES + FRAME_OVERHEAD_BYTES :][: choices.below(400)]
    )
    with refusals():
        list(split_records(payload, "where"))
    require(torn_entries(content) >= 0, "the number of torn entries is below 0")
    with refusals():
        decode_snapshot(metadata_snapshot(content), "where")
    with refusals():
        require(parse_properties(content, "where").encode() == content, "the properties were written again, and differ")


def state_target(data: bytes) -> None:
    """A snapshot's state, as a leader sends it or a disk gives it: taken as it is, or refused and nothing changed."""
    choices = Choices(data)
    whole = directory()
    (name,) = (each for each in whole.files if each.startswith("raft-snapshot-"))
    snapshot = decode_snapshot(whole.files[name], name)
    index, term = snapshot.index, snapshot.term
    if choices.one_in(3):
        content = mutate(snapshot.state, choices)
    else:
        message = MetadataSnapshot.FromString(snapshot.state)
        message.MergeFrom(message_of(MetadataSnapshot, choices))
        message.format, message.log_index, message.image_offset, message.digest = 1, index, index, bytes(16)
        content = message.SerializeToString()
    state = MetadataState()
    before = state.image
    try:
        state.restore(content, index, term)
    except RaftlogError as error:
        require(len(str(error)) > 20, f"a refusal gives no reason: {error}")
        require(state.image is before and state.last_applied == 0, "the content was refused, but has changed the state")
        return
    again = MetadataState()
    written = state.encode(state.capture())
    again.restore(written, index, term)
    require(again.encode(again.capture()) == written, "the snapshot was written again, and differs")
    try:
        MetadataSnapshot.FromString(content)
    except DecodeError:
        raise AssertionError("the content was accepted, but is no metadata snapshot") from None
