"""Exactly one copy, in order, whatever is lost, doubled, late, refused, timed out, or led by somebody else."""

from __future__ import annotations

import random

import pytest

from tests.support.idempotent_link import Link, Rules


def run(link: Link, steps: int = 250) -> Link:
    for _ in range(steps):
        link.step()
    link.heal()
    link.check()
    return link


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_every_record_is_there_once_and_in_order(first: int) -> None:
    renumbered = sum(run(Link(random.Random(seed))).renumbered for seed in range(first, first + 100))
    assert renumbered > 50, "numbers began anew, so that it matters when they may"


@pytest.mark.parametrize(
    ("rules", "first"),  # with a seed from which on it does not take long
    [
        (Rules(denies_when_confirmed=False), 460),
        (Rules(keeps_denials=False), 780),
        (Rules(answers_when_committed=False), 0),
        (Rules(follows_state=False), 0),
    ],
    ids=["denies-early", "forgets-denials", "answers-before-commit", "followers-do-not-note"],
)
def test_each_rule_of_the_brokers_is_needed(rules: Rules, first: int) -> None:
    for seed in range(first, first + 4000):
        try:
            run(Link(random.Random(seed), rules))
        except AssertionError:
            return
    pytest.fail("nothing went wrong without it")
