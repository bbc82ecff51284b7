"""Settings of every test run."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.support.spark_session import SHORT_LIVED, make_session

# A shell starts background jobs with Ctrl-C ignored, and every process below inherits that; tests send it all the same.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# PySpark forks to start the JVM, after gRPC has been used: gRPC's own handling of forks crashes there. It is looked at
# when gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# No test is about how long it takes: the machine may be busy with something else. Every run looks for new examples; a
# failing one is printed with what repeats it.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=50)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=1_000)  # ./dev test --long
settings.load_profile("ci" if "CI" in os.environ else "default")

SPARK = (
    "test_spark_chaos.py",
    "test_spark_examples.py",
    "test_demo.py",
    "test_spark_source.py",
    "test_spark_zombies.py",
    "test_spark_sink.py",
    "test_readme.py",
)
"""Files that run Spark, which takes all cores. One worker of xdist runs them, one after the other: Spark ends a query
whose Python process has not connected within ten seconds, which no option changes, and beside other Sparks on a slow
machine that is too short. Those that use the session `spark` share it."""

SLOW_FIRST = (
    *SPARK,
    "test_chaos.py",
    "test_replication_chaos.py",
    "test_transactions.py",
    "test_console.py",
    "test_compose.py",
    "test_power_loss.py",
    "test_durability.py",
    "test_cli.py",
    "test_staged_writer.py",
    "test_image.py",
    "test_schedules.py",
    "test_mutations.py",
    "test_shrink.py",
    "test_chart_auth.py",
    "test_recovery.py",
    "test_lives.py",
    "test_cleaner_crashes.py",
)
"""Files that take minutes begin first, so that no worker is left alone with one at the end."""

WITH_SERVERS = "tests/integration/"
MOSTLY_WAITING = (
    "test_kafka_groups.py",
    "test_delay_queue.py",
    "test_quorum_cluster.py",
    "test_replication.py",
    "test_cli_groups.py",
    "test_damage.py",
    "test_lost_servers.py",
    "test_cli_partitions.py",
    "test_kafka_security.py",
    "test_security.py",
    "test_recipes.py",
    "test_observability.py",
    "test_read_committed.py",
    "test_bad_input.py",
    "test_groups.py",
    "test_compaction.py",
    "test_doctor.py",
    "test_drain.py",
    "test_idempotence.py",
    "test_replaced_disk.py",
    "test_acls.py",
    "test_quotas.py",
    "test_tls.py",
    "test_server_log.py",
)
"""Files with servers that use less than half of a core, and wait for elections, sessions and timeouts otherwise; the
longest first."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker a file at a time, one worker all files that run Spark, and some workers files that wait only.

    Those are the workers beyond one for each core, among tests with servers: files that compute would starve each
    other's servers. The other workers leave these files to them as long as there is something else to do.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    cores = os.cpu_count() or 1

    class Scheduling(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "spark" if file.rpartition("/")[2] in SPARK else file

        def _next_for(self, node: Any) -> str | None:
            """Return the files that a worker gets next, None if there is nothing for it."""
            waiting = [scope for name in MOSTLY_WAITING if (scope := f"{WITH_SERVERS}{name}") in self.workqueue]
            if int(node.gateway.id.removeprefix("gw")) < cores:
                return next((scope for scope in self.workqueue if scope not in waiting), next(iter(waiting), None))
            others = (scope for scope in self.workqueue if scope != "spark" and not scope.startswith(WITH_SERVERS))
            return next(iter(waiting), next(others, None))

        def _assign_work_unit(self, node: Any) -> None:
            scope = self._next_for(node)
            if scope is None:
                node.shutdown()
            else:
                self.workqueue.move_to_end(scope, last=False)
                super()._assign_work_unit(node)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files first, and fuzzing last; the order within a file stays.

    Fuzzing traces memory, and cannot stop to (tests/fuzz/oracle.py): what a worker runs after it takes several times
    as long.
    """
    places = {name: place for place, name in enumerate(SLOW_FIRST)}
    last = len(places) + 1
    items.sort(key=lambda item: last if item.path.parent.name == "fuzz" else places.get(item.path.name, last - 1))


def pytest_collection_finish() -> None:
    """Exempt modules and tests, which stay, from garbage collection.

    Each worker of xdist has all of them, and each full collection would visit them.
    """
    gc.collect()
    gc.freeze()


_GIVES_WAY = pytest.StashKey[bool]()
"""Whether this worker of xdist already has a lower priority."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the worker that runs Spark have the processor first, for Spark's ten seconds (see `SPARK`).

    Linux divides the cores among sessions first; priorities count within a session only (`sched(7)`, autogroup).
    So nothing that tests start has a session of its own: servers and Sparks have process groups.
    """
    config = item.config
    if hasattr(config, "workerinput") and item.path.name not in SPARK and not config.stash.get(_GIVES_WAY, False):
        config.stash[_GIVES_WAY] = True
        os.nice(3)


_DIED = pytest.StashKey[bool]()
"""Whether a worker of xdist has died: of one that had no tests left, or none yet, xdist itself makes no failure."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note the death of a worker; one that is done has no `error`."""
    if error:
        node.config.stash[_DIED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which a worker died has failed."""
    if session.config.stash.get(_DIED, False):
        session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Spark session that all tests of the run share."""
    settings = {"spark.sql.shuffle.partitions": "2", **SHORT_LIVED}
    session = make_session("local[2,3]", tmp_path_factory.mktemp("spark"), settings)
    yield session
    session.stop()
