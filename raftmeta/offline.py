"""Procedures on the metadata directory of a controller that is stopped: `python -P -m raftmeta.offline COMMAND`.

    format      write meta.properties before the first start
    describe    print the contents
    set-voters  change the list of voters; from a single one with copies of its directory for the new ones

Each takes the directory's lock, so none works beside a running controller. docs/quorum.md says when to use which.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from raftlog.errors import InconsistentVoters, InvalidConfig, InvalidRequestError, RaftlogError, StorageError
from raftlog.v1.raft_pb2 import JOINING, VOTER, VoterState
from raftmeta.disk import MetadataDisk, OsDisk
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.voters import (
    BEFORE_NAME,
    PROPERTIES_NAME,
    MetaProperties,
    parse_properties,
    read_properties,
    write_properties,
)
from raftmeta.raft.wal import WriteAheadLog, unused_log

ALLOWED_VOTERS: Final = (1, 3, 5)
"""The numbers of voters that a server accepts: an even number tolerates no more failures than the odd one below it."""
LOST_MAJORITY: Final = (
    'When a majority is lost for good, and only then, --force does it all the same: see "A majority is lost for good" '
    "in docs/quorum.md"
)

FORCE_EXPLANATION: Final = """\
FORCED. The voters that stay need not have what the others had acknowledged: changes that only those had are lost, and
brokers may have seen them. This node decides alone now what happened. Do this once, on the survivor with the highest
log end, never on two nodes, and never start the removed voters again with their old directories."""


def majority(voters: int) -> int:
    """Return the size of a majority."""
    return voters // 2 + 1


def unsafe_change(present: Iterable[int], wanted: Iterable[int]) -> RaftlogError | None:
    """Return why a list of voters must not be replaced by another, or None; pure.

    New voters vote only once they have the whole log, so the voters that stay decide the elections after the change.
    Every majority of the new list that consists of these must overlap with every majority of the old list. Then one of
    its members has every committed entry.
    """
    old, new = set(present), set(wanted)
    removed = sorted(old - new)
    if len(removed) > 1:
        return InconsistentVoters(
            f"this would remove voters {_list(removed)} at once: those that stay need not have all that was committed. "
            "Remove or replace one at a time, and let the new one catch up in between (`raftlog cluster quorum`). "
            + LOST_MAJORITY
        )
    if majority(len(new)) + majority(len(old)) <= len(old):
        return InconsistentVoters(
            f"a majority of the voters {_list(new)} need not overlap with one of {_list(old)}; go by smaller "
            f"steps. {LOST_MAJORITY}"
        )
    if len(old) > 1 and len(old & new) < majority(len(new)):
        return InconsistentVoters(
            f"voters {_list(old & new)} are no majority of {_list(new)}, and new ones have no vote before they have "
            f"caught up: no leader could be elected. Add fewer at a time. {LOST_MAJORITY}"
        )
    return None


def parse_voters(text: str) -> tuple[int, ...]:
    """Return the ids in "1,2,3"; "1@host:port" is taken as well.

    Raises:
        InvalidConfig: it is none, names one twice, or so many that a server would refuse them.
    """
    ids = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        number = item.partition("@")[0]
        if not number.isdecimal():
            raise InvalidConfig(f"{item!r} is no voter; voters are node ids, for example 1,2,3")
        ids.append(int(number))
    if len(set(ids)) != len(ids) or len(ids) not in ALLOWED_VOTERS:
        raise InvalidConfig(f"voters {text!r}: name one, three or five different node ids, for example 1,2,3")
    return tuple(sorted(ids))


def format_directory(
    path: str, node_id: int, cluster_id: str, voters: Sequence[int], *, new_quorum: bool = False
) -> MetaProperties:
    """Write `meta.properties` into an empty directory.

    The state is VOTER only where no earlier vote can have been lost: on the only voter, or if the whole quorum is new.

    Raises:
        InvalidConfig: it is formatted already, or the node is not one of the voters.
    """
    if node_id not in voters:
        raise InvalidConfig(f"node {node_id} is not one of the voters {_list(voters)}")
    if not cluster_id.strip() or "\n" in cluster_id:
        raise InvalidConfig(
            "cluster.id is not set: set it in the configuration, the same on every node; `raftlog quorum new-id` makes "
            "one"
        )
    with _locked(path, make=True) as disk:
        found = read_properties(disk)
        if found is not None:
            raise InvalidConfig(
                f"{path} belongs to node {found.node_id} of cluster {found.cluster_id} already; nothing was changed"
            )
        state = VOTER if new_quorum or len(voters) == 1 else JOINING
        directory_id = unused_log(disk) or uuid.uuid4()
        properties = MetaProperties(cluster_id, node_id, directory_id, tuple(sorted(voters)), state)
        wal = WriteAheadLog(disk, directory_id)
        wal.open()
        wal.begin()  # first: without it, meta.properties stands for damage
        write_properties(disk, properties)
    return properties


def describe_directory(path: str) -> dict[str, Any]:
    """Return what a directory holds, as a start would find it.

    Raises:
        RaftlogError: it is in use, or cannot be read.
    """
    with _locked(path) as disk:
        found = read_properties(disk)
        if found is None:
            return {"directory": path, "formatted": False}
        wal = WriteAheadLog(disk, found.directory_id)
        wal.open()
        snapshot_index = SnapshotStore(disk).newest()
        return {
            "directory": path,
            "formatted": True,
            "cluster_id": found.cluster_id,
            "node_id": found.node_id,
            "directory_id": str(found.directory_id),
            "voters": list(found.voters),
            "voter_state": VoterState.Name(found.state),
            "term": wal.getCurrentTerm(),
            "log_start_index": wal.first_index,
            "log_end_index": wal.last_index,
            "log_end_term": wal.last_term,
            "snapshot_index": snapshot_index or 0,
        }


def set_voters(
    path: str, voters: Sequence[int], *, force: bool = False, copies: str | None = None
) -> tuple[MetaProperties, MetaProperties]:
    """Replace the list of voters; returns the properties before and after.

    New voters cannot vote yet, so a single voter would wait for them forever, and no other has the committed entries.
    So its directory is copied to `copies`/node-ID for each new voter before its own list changes.

    Until the node starts, the change may be corrected or undone: each change is compared with the original list.

    Raises:
        InvalidConfig: the directory is not formatted, or the node would no longer be a voter; copies are needed, or
            not needed, or their place is taken.
        InconsistentVoters: the change may lose committed changes, or leave no electable voter; `force` allows it.
    """
    wanted = tuple(sorted(voters))
    with _locked(path) as disk:
        present = _formatted(disk)
        found = _before(disk) or present
        if found.node_id not in wanted:
            raise InvalidConfig(
                f"node {found.node_id} itself is not in {_list(wanted)}: leave its directory alone and do not start it"
            )
        unsafe = unsafe_change(found.voters, wanted)
        if unsafe is not None and not force:
            raise unsafe
        changed = replace(found, voters=wanted, state=VOTER if force else found.state)
        added = [voter for voter in wanted if voter not in found.voters]
        if copies is not None:
            _check_copies(found, added)
            for voter in added:
                _copy(disk, str(Path(copies) / f"node-{voter}"), replace(changed, node_id=voter))
        elif len(found.voters) == 1 and added and not force:
            raise InvalidConfig(
                f"node {found.node_id} is the only voter, so the new ones need its data before they can vote: name a "
                f"directory for the copies with --copies DIR, and move each of {_list(added)} to its machine"
            )
        if changed != present:
            if found == present:
                write_properties(disk, present, BEFORE_NAME)
            write_properties(disk, changed)
    return present, changed


def _before(disk: MetadataDisk) -> MetaProperties | None:
    """Return the properties before the list was changed; None if the node has started since."""
    if BEFORE_NAME not in disk.names():
        return None
    return parse_properties(disk.read(BEFORE_NAME), f"{disk.path}/{BEFORE_NAME}")


def _check_copies(found: MetaProperties, added: Sequence[int]) -> None:
    if len(found.voters) > 1:
        raise InvalidConfig(
            f"the voters {_list(found.voters)} need not have the same data: new ones take theirs from the leader, when "
            "they start with an empty directory. Leave --copies away"
        )
    if not added:
        raise InvalidConfig("there is no new voter to make a copy for; leave --copies away")


def _copy(source: MetadataDisk, path: str, properties: MetaProperties) -> None:
    """Create a copy of the source's log, snapshots, and vote in the present term."""
    with _locked(path, make=True) as disk:
        if disk.names():
            raise InvalidConfig(
                f"{path} is not empty; the list of voters was not changed. Name another directory for the copies, and "
                "throw away those that were made before"
            )
        for name in source.names():
            if not name.startswith(PROPERTIES_NAME) and not name.endswith(".tmp"):
                disk.write(name, source.read(name))
                disk.sync(name)
        write_properties(disk, properties)


def _formatted(disk: MetadataDisk) -> MetaProperties:
    found = read_properties(disk)
    if found is None:
        raise InvalidConfig(f"{disk.path} is not formatted; is it the right directory?")
    return found


@contextmanager
def _locked(path: str, *, make: bool = False) -> Iterator[OsDisk]:
    if not make and not Path(path).is_dir():
        raise InvalidConfig(f"there is no directory {path}; is it the metadata.log.dir of the node?")
    disk = OsDisk(path)
    try:
        disk.lock()
        yield disk
    except BlockingIOError:
        raise StorageError(f"{path} is in use by a running controller; stop it first") from None
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error
    finally:
        disk.close()


def _list(ids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ids)))


# Command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 1 when it was refused."""
    options = _parser().parse_args(arguments)
    try:
        for line in _run(options):
            print(line)
    except RaftlogError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> Iterator[str]:
    path = options.metadata_dir
    match options.command:
        case "format":
            voters = parse_voters(options.voters or str(options.node_id))
            properties = format_directory(
                path, options.node_id, options.cluster_id, voters, new_quorum=options.new_quorum
            )
            if options.json:
                yield json.dumps(describe_directory(path))
                return
            yield f"formatted {path} for node {properties.node_id} of cluster {properties.cluster_id}"
            if properties.state == JOINING:
                yield "it joins without a vote until it has caught up; for a quorum that is all new, use --new-quorum"
        case "describe":
            described = describe_directory(path)
            if options.json:
                yield json.dumps(described)
            else:
                yield from (f"{key:16} {value}" for key, value in described.items())
        case "set-voters":
            before, after = set_voters(path, parse_voters(options.voters), force=options.force, copies=options.copies)
            if options.json:
                yield json.dumps({"before": list(before.voters), "after": list(after.voters), "forced": options.force})
                return
            if options.force:
                yield FORCE_EXPLANATION
            yield f"voters of node {after.node_id}: {_list(before.voters)} -> {_list(after.voters)}"
            yield "until the node starts, the change can be corrected or taken back by the same command"
            if options.copies is not None:
                yield f"move {options.copies}/node-ID to the metadata.log.dir of each new voter before it starts"
                yield f"set cluster.id to {after.cluster_id} in the configuration of every node"
                yield "list all voters in controller.quorum.voters of every node"
            else:
                yield (
                    "change controller.quorum.voters in its configuration likewise, and do the same on every other "
                    "voter that stays"
                )
        case _:
            raise InvalidRequestError(f"there is no command {options.command!r}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raftmeta.offline", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--metadata-dir", required=True, metavar="DIR")
        added.add_argument("--json", action="store_true", help="print JSON")
        return added

    formatting = command("format", "write meta.properties into an empty directory")
    formatting.add_argument("--node-id", type=int, required=True)
    formatting.add_argument("--cluster-id", required=True)
    formatting.add_argument("--voters", default="", help="node ids, for example 1,2,3; this node alone by default")
    formatting.add_argument(
        "--new-quorum", action="store_true", help="every voter is being formatted for the first time: vote at once"
    )
    command("describe", "print what a directory holds")
    changing = command("set-voters", "change the list of voters")
    changing.add_argument("--voters", required=True, help="node ids, for example 1,2,3")
    changing.add_argument("--force", action="store_true", help="even if what was committed may be lost")
    changing.add_argument("--copies", metavar="DIR", help="from one voter to several: where the new ones' copies go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
