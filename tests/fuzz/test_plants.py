"""Each target is shown to notice: a planted bug is found, and without it the same input passes."""

from __future__ import annotations

import pytest

from tests.fuzz.ci import node_of_the_module
from tests.fuzz.minimise import failure
from tests.fuzz.plants import PLANTS, catch, catch_alone, known_inputs
from tests.fuzz.registry import TARGETS

__all__ = ["node_of_the_module"]

KNOWN = known_inputs()


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    if PLANTS[name].alone:
        data = catch_alone(name)
    else:
        caught = catch(name, KNOWN.get(name))
        data = None if caught is None else caught[0]
    assert data is not None, f"{PLANTS[name].target} does not notice that {name}"
    assert failure(TARGETS[PLANTS[name].target].check, data) is None, (
        "the input that shows the planted bug also fails without it"
    )


def test_every_target_has_a_planted_bug() -> None:
    assert {plant.target for plant in PLANTS.values()} == TARGETS.keys()


def test_an_input_is_known_for_each() -> None:
    assert KNOWN.keys() == PLANTS.keys()
