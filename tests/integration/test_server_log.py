"""What servers write to their own log: transitions with stable names, and more of it on demand."""

from __future__ import annotations

import json
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raftlog import Admin
from raftlog.errors import InvalidConfig, InvalidRequestError
from raftlog.testing import Cluster
from tests.support import patience
from tests.support.steady import PATIENT
from tests.support.up_to_date import up_to_date

Line = dict[str, Any]


def lines(cluster: Cluster, node_id: int) -> list[Line]:
    log = cluster.config_file(node_id).parent / "server.log"
    whole, _, _ = log.read_text().rpartition("\n")  # the last line may just be written
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def events(cluster: Cluster, node_id: int) -> list[str]:
    return [line["event"] for line in lines(cluster, node_id) if "event" in line]


def counted(cluster: Cluster, node_id: int, name: str) -> float:
    ready = json.loads((cluster.config_file(node_id).parent / "ready.json").read_bytes())
    with urllib.request.urlopen(f"http://{ready['metrics']}/metrics", timeout=60) as answer:
        (line,) = (line for line in answer.read().decode().splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


until = partial(patience.until, within_s=60, pause_s=0.05)


def test_a_leader_change_is_told_by_events_and_levels_change_while_servers_run(tmp_path: Path) -> None:
    config: dict[str, str | int] = {**PATIENT, "log.format": "json", "metrics.listener": "127.0.0.1:0"}
    with Cluster(nodes=3, directory=tmp_path, config=config) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", replica_assignment=[[2, 3]], timeout=60)
            until(lambda: "leader_gained" in events(cluster, 2), "broker 2 leads")
            in_order = [
                *("node_starting", "metadata_ready", "logs_recovered", "broker_registered", "lease_granted"),
                *("node_ready", "leader_gained"),
            ]
            seen = events(cluster, 2)
            assert [seen.index(name) for name in in_order] == sorted(seen.index(name) for name in in_order)
            gained = next(line for line in lines(cluster, 2) if line.get("event") == "leader_gained")
            assert gained["partition"] == "orders-0"
            assert gained["isr"] == [2, 3]
            assert gained["node"] == 2
            assert gained["level"] == "info"

            admin.alter_configs(broker_logger=3, set={"broker.server.registration": "ERROR", "root": "DEBUG"})
            levels = admin.describe_configs(broker_logger=3)
            assert (levels["root"].value, levels["root"].source) == ("DEBUG", "dynamic_broker_logger")
            assert levels["broker.log"].value == "DEBUG"
            assert levels["broker.server.registration"].value == "ERROR"
            assert admin.describe_configs(broker_logger=2)["root"].value == "INFO", (
                "the log levels of broker 3 must not change those of broker 2"
            )
            until(lambda: any(line["level"] == "debug" for line in lines(cluster, 3)), "debug lines are written")
            admin.alter_configs(broker_logger=3, unset=["root"])
            assert admin.describe_configs(broker_logger=3)["root"].source == "static_broker"
            with pytest.raises(InvalidConfig, match="no logger 'brokers'"):
                admin.alter_configs(broker_logger=3, set={"brokers": "DEBUG"})
            with pytest.raises(InvalidRequestError, match="there is no broker 9"):
                admin.alter_configs(broker_logger=9, set={"root": "DEBUG"})

        cluster.wait_for(lambda admin: len(up_to_date(admin).describe_topic("orders").partitions[0].isr) == 2)
        cluster.kill(2)
        until(lambda: "leader_gained" in events(cluster, 3), "broker 3 leads")
        controller = cluster.controller(other_than=2)
        until(lambda: "controller_active" in events(cluster, controller), "the controller says that it is")
        until(lambda: any("broker_fenced" in events(cluster, node_id) for node_id in (1, 3)), "whoever decides says so")
        until(
            lambda: sum(counted(cluster, node_id, "raftlog_leader_elections_total") for node_id in (1, 3)) >= 1,
            "whoever decides counts it",
        )
        assert counted(cluster, controller, "raftlog_unclean_leader_elections_total") == 0
        cluster.start(2)
        until(
            lambda: any(
                (line["was"], sorted(line["isr"])) == ([3], [2, 3])
                for line in lines(cluster, 3)
                if line.get("event") == "isr_changed"
            ),
            "broker 2 is back in the ISR",
        )
        cluster.stop(3)
        assert events(cluster, 3)[-1] == "node_stopped"
