"""One target in a test run: Hypothesis makes the inputs, the same ones in every run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz import server
from tests.fuzz.engines import LARGEST
from tests.fuzz.minimise import failure, minimise
from tests.fuzz.registry import TARGETS

INPUTS = st.binary(max_size=80) | st.builds(
    lambda dice, size: dice.randbytes(size), st.randoms(use_true_random=False), st.integers(0, LARGEST)
)
"""Hypothesis likes its binaries short; a generator that runs out of bytes makes simple things only."""


@pytest.fixture(scope="module", autouse=True)
def node_of_the_module() -> Iterator[None]:
    """End the node that targets have talked to."""
    yield
    server.stop()


def fuzz(name: str, examples: int | None = None) -> None:
    """Try inputs; a failing one is made small and shown, with the command that runs it again."""
    target = TARGETS[name]
    target.prepare()

    @settings(
        max_examples=examples or target.examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(INPUTS)
    def some(data: bytes) -> None:
        error = failure(target.check, data)
        if error is not None:
            small = minimise(target.check, data, error, seconds=10)
            error.add_note(f"again: ./dev fuzz {name} --hex {small.hex() or repr('')}")
            raise error

    print(f"{name}: derandomized, {examples or target.examples} inputs")
    some()
