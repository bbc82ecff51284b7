"""Servers are restarted one after the other under load, and no client notices. bench/maintenance.py times it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench.maintenance import AWAIT, DRAIN, MIN_INSYNC, TOPIC, Load, restart
from raftlog import Admin
from raftlog.testing import Cluster
from tests.support.steady import STEADY

CONFIG: dict[str, int] = {**STEADY, "min.insync.replicas": MIN_INSYNC, "offsets.topic.num.partitions": 3}


@pytest.mark.parametrize("ways", [[DRAIN], pytest.param([AWAIT, DRAIN] * 3, marks=pytest.mark.long)])
def test_clients_see_no_error_when_servers_are_restarted_one_by_one(ways: list[tuple[str, ...]]) -> None:
    with Cluster(nodes=3, config=CONFIG) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=6, replication_factor=3, timeout=60)
        load = Load(cluster.bootstrap, records_per_s=300)
        load.settle()
        for number, way in enumerate(ways):
            restart(cluster, cluster.controller() if number == 0 else 1 + number % 3, way)  # the harder case first
        missing, _ = load.stop()
        assert load.errors == []
        assert load.below_min_isr.total() == 0
        assert load.looks > 0
        assert missing == 0


@pytest.mark.long
def test_the_script_of_the_guide_restarts_every_node(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "operations.md"
    (text,) = re.findall(r"```sh\n(.*?)```", guide.read_text(), re.DOTALL)
    script, asked = tmp_path / "roll.sh", tmp_path / "asked"
    asked.mkdir()
    by_ssh = 'restart() { ssh "node-$1" sudo systemctl restart raftlog; }\n'
    assert by_ssh in text
    here = f'restart() {{ touch "{asked}/$1"; while [ -e "{asked}/$1" ]; do sleep 0.1; done; }}\n'
    script.write_text(text.replace(by_ssh, here))
    with Cluster(nodes=3, config=CONFIG) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=6, replication_factor=3, timeout=60)
        active, order = cluster.controller(), []
        pids = {node_id: cluster.pid(node_id) for node_id in cluster.node_ids}
        load = Load(cluster.bootstrap, records_per_s=300)
        load.settle()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "RAFTLOG_BOOTSTRAP": cluster.bootstrap}
        with subprocess.Popen(["/bin/sh", str(script)], env=environment, stderr=subprocess.PIPE, text=True) as running:
            said: list[str] = []
            reader = threading.Thread(target=lambda: said.extend(running.stderr or ()))
            reader.start()
            while running.poll() is None:
                for file in asked.iterdir():
                    order.append(int(file.name))
                    cluster.stop(order[-1])
                    cluster.start(order[-1])
                    file.unlink()
                time.sleep(0.05)
            reader.join()
        missing, _ = load.stop()
        assert running.returncode == 0, said
        assert sorted(order) == cluster.node_ids
        assert order[-1] == active
        assert all(cluster.pid(node_id) != pid for node_id, pid in pids.items())
        assert load.errors == []
        assert load.below_min_isr.total() == 0
        assert missing == 0
        with Admin(cluster.bootstrap) as admin:
            assert not any(broker.drained for broker in admin.describe_cluster().brokers)
            partitions = admin.describe_topic(TOPIC).partitions
        assert [part.leader for part in partitions] == [part.replicas[0] for part in partitions]
