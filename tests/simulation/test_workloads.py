"""Scenario files: their valid content, and that each makes its faults happen (hours of them: test_schedules)."""

from __future__ import annotations

import pytest

from tests.simulation import workloads
from tests.simulation.runner import KINDS
from tests.simulation.workloads import ScenarioError

WELL = """
about = "a test"
kinds = ["brokers"]
happens = ["fault kill"]
"""
WORKLOADS = {"append-poll", "idempotent", "transactions", "groups", "metadata-churn", "spark-sink"}


def test_all_are_read() -> None:
    for name in workloads.names():
        scenario = workloads.load(name)
        assert scenario.name == name
        assert len(scenario.about) < 120


def test_every_workload_has_some() -> None:
    names = workloads.names()
    assert [workload for workload in WORKLOADS if not any(name.startswith(workload) for name in names)] == []
    assert "random-mixture" in names
    assert {kind for name in names for kind in workloads.load(name).kinds} == KINDS.keys()


@pytest.mark.parametrize(
    ("family", "faults"),
    [
        ("links, one direction at a time", {"cut-one-way"}),
        ("delay", {"slow-path"}),
        ("lost streams", {"break-connections"}),
        ("duplicate and late requests", {"old-leader-returns", "slow-answers"}),
        ("partitions", {"part-majority", "part-minority", "bridge", "split", "isolate", "part-brokers"}),
        ("torn and lost writes", {"die-writing", "die-in-log", "cut-power", "rot"}),
        ("corrupt disks", {"flip"}),
        ("full disks", {"full-disk", "full-log"}),
        ("slow disks", {"slow-disk", "slow-log"}),
        ("broken disks", {"broken-disk", "broken-log"}),
        ("power loss", {"cut-power", "cut-power-of-brokers"}),
        ("clocks", {"step-clock"}),
        ("pauses", {"pause"}),
        ("operators", {"reassign", "delete-records", "shut-down", "elect-preferred"}),
    ],
)
def test_every_family_of_faults_is_some_scenarios_own(family: str, faults: set[str]) -> None:
    """The faults that a scenario names must happen: `test_schedules` checks that."""
    happens = {what for name in workloads.names() for what in workloads.load(name).happens}
    assert {f"fault {fault}" for fault in faults} <= happens


def test_what_it_says_is_in_the_plan() -> None:
    text = f"{WELL}\nseconds = 3\npace_s = 0.2\n[options]\nvoters = 3\ntopics = 2\n[faults]\nkill = 1\n"
    scenario = workloads.read("told", text)
    assert scenario.plan.options == {"voters": 3, "topics": 2}
    assert scenario.plan.weights == {"kill": 1}
    assert scenario.plan.pace_s == 0.2
    assert scenario.seconds == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('abuot = "x"', "key 'abuot' is not known; did you mean about?"),
        (WELL.replace("brokers", "broker"), "kind 'broker' is not known; did you mean brokers?"),
        (f"{WELL}[options]\ntopcis = 1", "option of brokers 'topcis' is not known; did you mean topics"),
        (f"{WELL}[options]\ndeath_factor = 1.0", "option of brokers 'death_factor' is not known"),
        (f"{WELL}[faults]\ncut-one-wya = 1", "fault of brokers 'cut-one-wya' is not known; did you mean cut-one-way"),
        (f"{WELL}[options]\ntopics = 1.5", "topics = 1.5; it is to be of type int"),
        (f"{WELL}[options]\ntopics = true", "topics = True; it is to be of type int"),
        (f'{WELL}[faults]\nkill = "often"', "kill = 'often'; it is to be of type float"),
        (f"{WELL}[options]\nvoters = 2", "voters = 2; it is one of"),
        ('about = "a test"\nkinds = ["brokers"]', "`happens` say what it is for"),
    ],
)
def test_what_nobody_understands_is_refused(text: str, says: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        workloads.read("told", text)
    assert says in str(refused.value)


def test_a_name_that_is_not_there_suggests_the_nearest() -> None:
    with pytest.raises(ScenarioError, match="did you mean append-poll-delays"):
        workloads.load("append-poll-delay")
