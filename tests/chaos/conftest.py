"""The common fixtures of container tests: the image, and the logs of all nodes beside the report of a failed test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

# The helper that removes containers of dead test runs is an image of its own, which cannot be had everywhere.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

from tests.chaos import host
from tools.docker import Image, NoBaseImage, NoEngine, ensure_image, ensure_previous_image


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """Skip where no container can be run."""
    problem = host.missing()
    if problem is not None:
        pytest.skip(problem)


def _made(make: Callable[[], Image]) -> Image:
    """Return an image, or skip where this machine can get at none to build on."""
    try:
        return make()
    except (NoBaseImage, NoEngine) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def image(docker_engine: None) -> Image:
    """The image of this checkout, or the one that RAFTLOG_TEST_IMAGE names."""
    named = os.environ.get("RAFTLOG_TEST_IMAGE")
    return _made(ensure_image) if named is None else Image(named, "RAFTLOG_TEST_IMAGE")


@pytest.fixture(scope="session")
def previous_image(docker_engine: None) -> Image:
    """The image of the release before."""
    return _made(ensure_previous_image)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Put the nodes' logs into the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined] # pluggy's, which pytest does not type
    nodes = getattr(item, "funcargs", {}).get("nodes") or getattr(item, "funcargs", {}).get("upgraded")
    if report.when == "call" and report.failed and nodes is not None:
        report.sections.append(("the nodes' logs", nodes.logs()))
