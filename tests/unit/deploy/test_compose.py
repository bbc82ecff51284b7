"""compose.yaml: servers take what it tells them, Prometheus asks where they answer. No container is started here."""

from __future__ import annotations

import re
from typing import Any

import yaml

from broker.config.config import BrokerConfig
from tools.environment import ROOT
from tools.helm import CHART

HERE = ROOT / "deploy" / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((HERE / "compose.yaml").read_text())
NODES = {name: service for name, service in COMPOSE["services"].items() if name.startswith("node-")}


def load(service: dict[str, Any]) -> BrokerConfig:
    environment = {key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for key, value in service["environment"].items()}
    return BrokerConfig.load(environment=environment)


def test_three_nodes_form_one_cluster() -> None:
    configs = [load(service) for service in NODES.values()]
    assert len({config.node_id for config in configs}) == len(configs) == 3
    (voters,) = {tuple(sorted(config.controller_quorum_voters.items())) for config in configs}
    assert {host for _, (host, _) in voters} == set(NODES)
    assert len({config.cluster_id for config in configs}) == 1


def test_every_node_listens_for_both_kinds_of_clients_where_it_is_published() -> None:
    for name, service in NODES.items():
        config = load(service)
        assert config.kafka_listener is not None
        assert config.advertised_listener is not None
        assert config.advertised_kafka_listener is not None
        told = {config.advertised_listener[1], config.advertised_kafka_listener[1]}
        assert told == {config.listener[1], config.kafka_listener[1]}
        published = {int(each.rpartition(":")[2]) for each in service["ports"]} - {9464}
        assert published == told, name


def test_nothing_is_published_beyond_this_machine_unless_somebody_says_so() -> None:
    for name, service in COMPOSE["services"].items():
        for port in service["ports"]:
            assert re.match(r"(127\.0\.0\.1|\$\{RAFTLOG_PUBLISH:-127\.0\.0\.1\}):", port), (name, port)


def test_containers_have_no_rights_that_they_do_not_need() -> None:
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_prometheus_asks_every_node_where_it_answers() -> None:
    (job,) = yaml.safe_load((HERE / "prometheus.yml").read_text())["scrape_configs"]
    (targets,) = job["static_configs"]
    expected = {f"{name}:{(load(service).metrics_listener or ('', 0))[1]}" for name, service in NODES.items()}
    assert set(targets["targets"]) == expected


def test_prometheus_has_the_alerts_of_the_chart_with_the_labels_that_they_group_by() -> None:
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    mounts = dict(each.split(":")[:2] for each in COMPOSE["services"]["prometheus"]["volumes"])
    sources = {target: HERE / source for source, target in mounts.items() if source.startswith(".")}
    assert sources["/etc/prometheus/prometheus.yml"].resolve() == HERE / "prometheus.yml"
    for file in config["rule_files"]:
        assert sources[file].resolve() == CHART / "files" / "alerts.yaml"
    (job,) = config["scrape_configs"]
    given = {"dir", "le"} | set(job["static_configs"][0]["labels"])
    given |= {each["target_label"] for each in job["relabel_configs"]}
    alerts = (CHART / "files" / "alerts.yaml").read_text()
    grouped = {label.strip() for labels in re.findall(r"\bby \((.*?)\)", alerts) for label in labels.split(",")}
    assert {"namespace", "pod"} <= grouped
    assert {"namespace", "pod"} <= given
