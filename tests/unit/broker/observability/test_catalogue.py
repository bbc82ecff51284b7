"""Alerts and the dashboard use existing metrics; the documentation names all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from broker.observability.metrics import Described, catalogue
from raftlog._core.metrics import MEANINGS, meaning_of
from tools.reference import client_metrics

ROOT = Path(__file__).resolve().parents[4]
FILES = ROOT / "deploy" / "k8s" / "raftlog" / "files"
FROM_ELSEWHERE = {"raftlog_process_resident_memory_bytes"}
"""Of prometheus_client's own collectors."""


def described() -> list[Described]:
    return [family for families in catalogue().values() for family in families]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\braftlog_[a-z_]+", expression))


def selectors_in(expression: str) -> list[tuple[str, set[str]]]:
    """Return (name, labels that are selected by) of every selector with braces."""
    found = re.findall(r"\b(raftlog_[a-z_]+)\{([^}]*)\}", expression)
    return [(name, set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", inner))) for name, inner in found]


def expressions() -> list[str]:
    rules = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    return [
        *(rule["expr"] for group in rules for rule in group["rules"]),
        *(target["expr"] for panel in panels for target in panel["targets"]),
    ]


def test_alerts_and_panels_ask_for_samples_that_there_are_by_labels_that_they_have() -> None:
    labels = {name: set(family.labels) for family in described() for name in family.samples()}
    asked = set().union(*map(names_in, expressions()))
    assert asked - labels.keys() == FROM_ELSEWHERE
    assert len(asked) > 30
    for expression in expressions():
        for name, selected in selectors_in(expression):
            own = selected - {"namespace", "pod", "le"}
            assert own <= labels.get(name, set()), (
                f"the expression selects {name} by labels that it has not: {own - labels.get(name, set())}"
            )


def test_panels_stand_side_by_side() -> None:
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))


def test_families_are_named_and_described_as_prometheus_wants_it() -> None:
    found = described()
    assert len({family.name for family in found}) == len(found)
    for family in found:
        assert re.fullmatch(r"raftlog_[a-z_]+", family.name), family.name
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.kind != "histogram" or family.name.endswith("_seconds"), family.name
        assert family.doc.endswith("."), family.name
        assert len(family.doc) > 5, family.name


def test_every_figure_of_clients_has_a_meaning_and_every_meaning_a_figure() -> None:
    shown = {name for figures in client_metrics().values() for name in figures}
    assert all(meaning_of(name) for name in shown)
    stems = {re.sub(r"-(rate|total|avg|max)$", "", name) for name in shown}
    assert stems | shown >= MEANINGS.keys()
