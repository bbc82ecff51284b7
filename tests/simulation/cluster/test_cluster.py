"""Schedules of a whole cluster with the SDK as it ships.

`tests/simulation/test_schedules.py` has some hours of every kind, and that a seed is a whole run; `test_mutations.py`
hunts the planted bugs. Here is what is particular to this kind.
"""

from __future__ import annotations

import ast
import inspect
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType

import pytest

from raftlog._client import connections
from tests.simulation.cluster.schedule import ClusterSimulation
from tests.simulation.cluster.surroundings import modules, simulated
from tests.simulation.runner import Job, new_pool, run_job

LONG_SCHEDULES = 2_000
CHUNK = 20
assert LONG_SCHEDULES % CHUNK == 0
CLOCKS = {"monotonic", "monotonic_ns", "time", "time_ns", "perf_counter", "perf_counter_ns"}
SDK = ("raftlog._client", "raftlog._core", "raftlog.aio")
THREADS_OF_THEIR_OWN = {
    "raftlog._client.background",  # of the synchronous classes
    "raftlog._client.admin",  # to hash passwords
    "raftlog._client.security",  # with TLS, which no simulation has
}
"""None of these threads is in a simulation."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with new_pool() as workers:
        yield workers


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, LONG_SCHEDULES, CHUNK))
def test_many_schedules(pool: ProcessPoolExecutor, first: int) -> None:
    runs = [pool.submit(run_job, Job(seed, "cluster")) for seed in range(first, first + CHUNK)]
    outcomes = [each.result() for each in runs]
    assert [f"{each}\n  {each.job.command()} --trace" for each in outcomes if each.violation is not None] == []


def sdk() -> list[ModuleType]:
    return [module for name, module in modules() if name.startswith(SDK)]


def test_the_sdk_has_no_clock_but_the_one_that_is_exchanged() -> None:
    """The SDK reads the time through names of its own modules, which `simulated` replaces."""
    assert len(sdk()) > 30
    for module in sdk():
        names = {value.id for value in _values(module) if isinstance(value, ast.Name)}
        for name in names & vars(module).keys():
            found = vars(module)[name]
            stands_for_a_clock = any(found is getattr(time, clock) for clock in CLOCKS)
            assert not stands_for_a_clock or found in (time.time_ns, time.monotonic), (module.__name__, name)
        assert not names & {"SystemRandom", "urandom"}, module.__name__


def test_the_sdk_starts_no_threads_where_it_is_asynchronous() -> None:
    for module in sdk():
        if module.__name__ not in THREADS_OF_THEIR_OWN:
            called = [ast.unparse(node.func) for node in ast.walk(_tree(module)) if isinstance(node, ast.Call)]
            assert not {"threading.Thread", "ThreadPoolExecutor", "asyncio.to_thread"} & set(called), module.__name__


def test_surroundings_are_exchanged_and_come_back() -> None:
    opens = connections._open
    with simulated(ClusterSimulation(1, 1)) as exchanged:
        assert {
            "raftlog._client.metadata.time",
            "raftlog._client.group_consumer.uuid",
            "raftlog._delivery.time",
            "raftlog.aio._producer._time_ns",
        } <= set(exchanged)
        assert connections._open is not opens
    assert connections._open is opens
    for _, module in modules():
        for value in vars(module).values():
            assert type(value).__module__ != "tests.simulation.cluster.surroundings", module.__name__


def _tree(module: ModuleType) -> ast.AST:
    return ast.parse(inspect.getsource(module))


def _values(module: ModuleType) -> Iterator[ast.AST]:
    return ast.walk(_tree(module))
