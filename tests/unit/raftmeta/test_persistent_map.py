"""The persistent map behaves like a dict that is copied for every change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.image import MapBuilder, PersistentMap

_keys = st.text("ab.", max_size=3)
_changes = st.lists(st.lists(st.tuples(_keys, st.none() | st.integers(0, 9)), max_size=5), max_size=10)


@given(st.dictionaries(_keys, st.integers()), _changes)
def test_every_version_stays_what_it_was(start: dict[str, int], changes: list[list[tuple[str, int | None]]]) -> None:
    versions: list[tuple[PersistentMap[str, int], dict[str, int]]] = [(PersistentMap(start), dict(start))]
    for change in changes:
        builder, model = MapBuilder(versions[-1][0]), dict(versions[-1][1])
        for key, value in change:
            assert (key in builder) == (key in model)
            assert builder.get(key) == model.get(key)
            if value is not None:
                builder[key] = model[key] = value
            elif key in model:
                assert builder.pop(key) == model.pop(key)
            else:
                with pytest.raises(KeyError):
                    builder.pop(key)
        versions.append((builder.build(), model))
    for version, model in versions:
        assert version == model
        assert [version == other for other, _ in versions] == [model == other for _, other in versions]
        assert version == PersistentMap(model)
        assert len(version) == len(model)
        assert sorted(version) == sorted(model)
        assert all(version[key] == value and key in version for key, value in model.items())
        assert version.get("zzz") is None


def test_nothing_written_is_the_same_map() -> None:
    base = PersistentMap({b"a": 1})
    assert MapBuilder(base).build() is base
    assert PersistentMap.of(base) is base
    assert PersistentMap.of({b"a": 1}) == base


def test_the_order_is_the_same_in_every_process() -> None:
    assert list(PersistentMap((key, None) for key in ("one", "two", "three"))) == ["two", "one", "three"]
