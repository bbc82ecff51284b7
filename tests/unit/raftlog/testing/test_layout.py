"""Which server of a cluster is what, and that a directory keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raftlog.errors import InvalidConfig
from raftlog.testing.layout import LAYOUT_FILE, Layout, check_size, default_controllers, free_ports, open_layout


@pytest.mark.parametrize(("nodes", "controllers"), [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 3), (7, 3)])
def test_as_many_nodes_are_controllers_as_make_a_quorum(nodes: int, controllers: int) -> None:
    assert default_controllers(nodes) == controllers
    check_size(nodes, controllers, False)


def test_a_node_alone_is_told_nothing_of_a_quorum(tmp_path: Path) -> None:
    layout = open_layout(tmp_path, 1, 1, False, 0)
    assert layout.config(1, {}) == {}
    assert layout.client_ports == {}


def test_every_node_has_the_same_voters_and_a_listener_of_its_own(tmp_path: Path) -> None:
    layout = open_layout(tmp_path, 4, 3, False, 9092)
    configs = {node_id: layout.config(node_id, layout.inter_node_ports) for node_id in (1, 2, 3, 4)}
    assert len({str(config["controller.quorum.voters"]) for config in configs.values()}) == 1
    assert len({str(config["cluster.id"]) for config in configs.values()}) == 1
    assert configs[1]["process.roles"] == "broker,controller"
    assert configs[1]["inter.node.listener"] == f"127.0.0.1:{layout.inter_node_ports[1]}"
    assert configs[4]["process.roles"] == "broker"
    assert configs[4]["inter.node.listener"] == f"127.0.0.1:{layout.broker_only_ports[4]}"
    assert not any("inter.node.routes" in config for config in configs.values())
    assert layout.client_ports == {1: 9092, 2: 9093, 3: 9094, 4: 9095}


def test_dedicated_controllers_serve_no_clients(tmp_path: Path) -> None:
    layout = open_layout(tmp_path, 5, 3, True, 9092)
    assert [layout.is_broker(node_id) for node_id in range(1, 6)] == [False] * 3 + [True] * 2
    assert layout.roles(1) == ["controller"]
    assert layout.client_ports == {4: 9092, 5: 9093}


def test_a_directory_keeps_its_cluster(tmp_path: Path) -> None:
    first = open_layout(tmp_path, 3, 3, False, 0)
    assert open_layout(tmp_path, 3, 3, False, 0) == first
    for size in ((1, 1, False), (5, 5, False), (3, 1, False)):
        with pytest.raises(InvalidConfig, match="has a cluster of 3 nodes, 3 of them controllers"):
            open_layout(tmp_path, *size, 0)


def test_a_directory_from_before_layouts_were_kept_has_one_node(tmp_path: Path) -> None:
    (tmp_path / "node-1").mkdir()
    with pytest.raises(InvalidConfig, match="has a cluster of 1 nodes"):
        open_layout(tmp_path, 3, 3, False, 0)
    assert open_layout(tmp_path, 1, 1, False, 0) == Layout(nodes=1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"nodes": 3}', '{"inter_node_ports": {}, "client_ports": {"x": 1}}'])
def test_a_damaged_layout_is_reported_and_left(tmp_path: Path, text: str) -> None:
    (tmp_path / LAYOUT_FILE).write_text(text)
    with pytest.raises(InvalidConfig, match="is damaged"):
        open_layout(tmp_path, 3, 3, False, 0)
    assert (tmp_path / LAYOUT_FILE).read_text() == text


def test_free_ports_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(1024 < port < 32_768 for port in ports)


def test_an_earlier_layout_gets_ports_for_those_that_are_only_brokers(tmp_path: Path) -> None:
    layout = open_layout(tmp_path, 5, 3, False, 0)
    path = tmp_path / LAYOUT_FILE
    kept = json.loads(path.read_text())
    del kept["broker_only_ports"]
    path.write_text(json.dumps(kept))
    again = open_layout(tmp_path, 5, 3, False, 0)
    assert again.inter_node_ports == layout.inter_node_ports
    assert again.broker_only_ports.keys() == {4, 5}
    assert open_layout(tmp_path, 5, 3, False, 0) == again


def test_nodes_behind_proxies_are_told_how_to_reach_each_other(tmp_path: Path) -> None:
    layout = open_layout(tmp_path, 4, 3, False, 0)
    own = layout.all_inter_node_ports
    config = layout.config(1, {1: own[1], 2: 32_002, 3: 32_003, 4: 32_004})
    assert config["inter.node.listener"] == f"127.0.0.1:{own[1]}"
    assert config["controller.quorum.voters"] == f"1@127.0.0.1:{own[1]},2@127.0.0.1:32002,3@127.0.0.1:32003"
    assert config["inter.node.routes"] == "2@127.0.0.1:32002,3@127.0.0.1:32003,4@127.0.0.1:32004"
