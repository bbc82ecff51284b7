"""The awaitable clients come from the synchronous ones: same names, same arguments, whole docstrings, never stale."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import raftlog
import raftlog.aio
from tools import aio

SOURCE = '''"""A module."""

from __future__ import annotations

from raftlog._client.background import Client


class Producer(Client[int]):
    """Counts. Thread-safe: share it.

    >>> Producer().count()
    1

    Raises:
        ValueError: never.
    """

    # aio-doc: >>> asyncio.run(Producer().count())
    # aio-doc: 1

    def _abandon(self) -> None:  # sync
        self._engine = 0

    def count(self) -> int:
        """Return a number."""
        self.rest()  # aio: await asyncio.sleep(0)
        return self._thread.run(self._engine.count())

    def all(self) -> list[int]:
        """Return numbers."""
        # aio: assert self._made
        return [self.count() for _ in range(3)]

    def name(self) -> str:
        """Return a name."""
        return "counter"

    def __enter__(self) -> Producer:
        return self
'''
AWAITABLE = '''class Producer(Client[int]):
    """Counts. Belongs to the event loop that runs when it is first used.

    >>> asyncio.run(Producer().count())
    1

    Raises:
        ValueError: never.
    """

    async def count(self) -> int:
        """Return a number."""
        await asyncio.sleep(0)
        return await self._engine.count()

    async def all(self) -> list[int]:
        """Return numbers."""
        assert self._made
        return [await self.count() for _ in range(3)]

    def name(self) -> str:
        """Return a name."""
        return "counter"

    async def __aenter__(self) -> Producer:
        return self
'''
PAIRS = [
    (getattr(raftlog, name), getattr(raftlog.aio, name)) for name in ("Admin", "Consumer", "DelayQueue", "Producer")
]


def test_a_client_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raftlog").mkdir()
    (tmp_path / "raftlog" / "_producer.py").write_text(SOURCE)
    (tmp_path / "pyproject.toml").write_text((aio.ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(aio, "ROOT", tmp_path)
    monkeypatch.setattr(aio, "MODULES", {"_producer": ("Producer",)})
    aio.generate(tmp_path)
    written = (tmp_path / "_producer.py").read_text()
    assert written[written.index("class ") :] == AWAITABLE
    assert "from raftlog.aio._loop import Client\n" in written


def test_the_checkout_is_fresh_and_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aio.stale() == []
    monkeypatch.setattr(aio, "RENAMED", {**aio.RENAMED, "Deadline": "Delivery"})
    assert "_delay_queue.py" in aio.stale()


@pytest.mark.parametrize(("synchronous", "awaitable"), PAIRS, ids=lambda client: client.__module__)
def test_both_have_the_same_methods(synchronous: type, awaitable: type) -> None:
    public = {name for name in vars(synchronous) if not name.startswith("_")}
    assert public == {name for name in vars(awaitable) if not name.startswith("_")}
    for name in public | {"__init__"}:
        one, other = getattr(synchronous, name), getattr(awaitable, name)
        if callable(one):
            assert list(inspect.signature(one).parameters.values()) == list(
                inspect.signature(other).parameters.values()
            )
        if name != "__init__":
            assert len(other.__doc__) > 10, name
