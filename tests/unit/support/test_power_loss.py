"""The possible files and names after a power loss: never less than the durable content, never bytes that were not
written."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.power.journal import Change, Kind, Tree
from tests.support.power.loss import SECTOR_BYTES, Durable, choose_content, choose_names

ROOT, FILE = 1, 2
SMALL = st.integers(0, 4 * SECTOR_BYTES)


def change(
    kind: Kind, position: int, *, offset: int = 0, length: int = 0, old_size: int = 0, old: bytes = b""
) -> Change:
    return Change(position, kind, length, FILE, ROOT, 0, 0, offset, length, old_size, "", "", old)


def name_change(kind: Kind, position: int, node: int, name: str, to: str = "") -> Change:
    return Change(position, kind, 0, node, ROOT, ROOT if to else 0, 0, 0, 0, 0, name, to, b"")


def sync(node: int, upto: int) -> Change:
    return Change(upto, Kind.SYNC, 0, node, 0, 0, 0, upto, 0, 0, "", "", b"")


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[bytes], list[Change]]:
    """Draw the versions of a file, and the changes that lead from each to the next."""
    versions = [bytes([1]) * draw(SMALL)]
    changes = []
    for number in range(draw(st.integers(1, 6))):
        content = bytearray(versions[-1])
        size = len(content)
        if draw(st.booleans()):
            offset, data = draw(SMALL), bytes([number + 2]) * draw(st.integers(1, 1500))
            old = bytes(content[offset : offset + len(data)])
            content.extend(bytes(max(0, offset - size)))
            content[offset : offset + len(data)] = data
            changes.append(change(Kind.WRITE, number, offset=offset, length=len(data), old_size=size, old=old))
        else:
            length = draw(SMALL)
            old = bytes(content[length:])
            content = content[:length] + bytes(max(0, length - size))
            changes.append(change(Kind.RESIZE, number, offset=length, length=length, old_size=size, old=old))
        versions.append(bytes(content))
    return versions, changes


@given(histories(), st.integers(0, 1 << 32))
def test_each_sector_is_as_it_was_at_some_time_or_zeros(history: tuple[list[bytes], list[Change]], seed: int) -> None:
    versions, changes = history
    _, left = choose_content(versions[-1], changes, Random(seed))
    shortest, longest = min(map(len, versions)), max(map(len, versions))
    assert shortest <= len(left) <= longest
    for at in range(0, len(left), SECTOR_BYTES):
        sector = left[at : at + SECTOR_BYTES]
        once = {(version[at : at + SECTOR_BYTES] + bytes(SECTOR_BYTES))[: len(sector)] for version in versions}
        assert sector in once or not sector.strip(b"\0") or any(known.startswith(sector) for known in once)


@given(histories())
def test_everything_may_be_lost_and_everything_kept(history: tuple[list[bytes], list[Change]]) -> None:
    versions, changes = history
    left = {choose_content(versions[-1], changes, Random(seed))[1] for seed in range(200)}
    assert versions[0] in left
    assert versions[-1] in left


def test_a_name_that_is_lost_takes_along_what_was_built_upon_it() -> None:
    changes = [
        name_change(Kind.CREATE, 1, 10, "a"),
        name_change(Kind.CREATE, 2, 11, "new"),
        name_change(Kind.RENAME, 3, 11, "new", "a"),
        name_change(Kind.REMOVE, 4, 11, "a"),
        name_change(Kind.CREATE, 5, 12, "b"),
    ]
    found = set()
    for seed in range(200):
        tree = Tree(ROOT, {ROOT: {}})
        for each in choose_names(changes, Durable([]), Random(seed))[1]:
            tree.apply(each)
        found.add(frozenset(tree.names[ROOT].items()))
    a, new, replaced, b = ("a", 10), ("new", 11), ("a", 11), ("b", 12)
    expected = [set(), {a}, {new}, {a, new}, {replaced}, {b}, {a, b}, {new, b}, {a, new, b}, {replaced, b}]
    assert found <= set(map(frozenset, expected))
    assert {frozenset(), frozenset({b}), frozenset({a, new}), frozenset({replaced})} <= found


def test_what_was_synced_is_durable() -> None:
    changes = [
        name_change(Kind.CREATE, 1, 10, "a"),
        change(Kind.WRITE, 2, length=5),
        sync(ROOT, 3),
        name_change(Kind.CREATE, 4, 11, "b"),
        sync(FILE, 5),
        change(Kind.WRITE, 6, length=5),
    ]
    durable = Durable(changes)
    assert [durable.has(each) for each in changes if each.kind is not Kind.SYNC] == [True, True, False, False]
    for seed in range(50):
        assert changes[0] in choose_names(changes, durable, Random(seed))[1]
