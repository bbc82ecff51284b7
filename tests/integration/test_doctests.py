"""The examples in the SDK's documentation run as they stand, against a real server."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator

import pytest

from raftlog import Admin
from raftlog.testing import Cluster
from tests.support.steady import STEADY

MODULES = [
    "raftlog._admin",
    "raftlog._producer",
    "raftlog._consumer",
    "raftlog.aio._admin",
    "raftlog.aio._producer",
    "raftlog.aio._consumer",
    "raftlog._delay_queue",
    "raftlog.aio._delay_queue",
    "raftlog._staged_writer",
    "raftlog.security",
]
TOPICS = ["greetings", "letters", "orders", "aio-greetings", "aio-orders", "accounts"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(config=STEADY) as cluster:
        with Admin(cluster.bootstrap) as admin:
            for topic in TOPICS:
                admin.create_topic(topic)
        yield cluster


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, cluster: Cluster) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    finder = doctest.DocTestFinder(recurse=True)
    globs: dict[str, object] = {"cluster": cluster}
    tests = [test for test in finder.find(module, globs={**vars(module), **globs}) if test.examples]
    tests.sort(key=lambda test: test.lineno or 0)  # as a reader meets them: later examples build on earlier ones
    shared: dict[str, object] = {**vars(module), **globs}
    output: list[str] = []
    for test in tests:
        test.globs = shared
        runner.run(test, out=output.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)
    assert tests, "the module has no examples to run"
