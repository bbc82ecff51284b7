"""Changes of configs that are made from those in force begin with the newest, whichever broker took it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from broker.kafka.admin import APPEND, DELETE, SET, SUBTRACT, AdminApis
from broker.kafka.messages import ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS
from broker.security.caller import Caller
from raftlog.v1 import admin_pb2


class Late:
    """A broker that hears of another's change, `delete` to `delete,compact`, only when it asks the controllers."""

    def __init__(self) -> None:
        self.heard = False
        self.altered: list[admin_pb2.AlterConfigsRequest] = []
        admin = SimpleNamespace(
            AlterConfigs="AlterConfigs", DescribeConfigs="DescribeConfigs", DescribeCluster="DescribeCluster"
        )
        services: Any = SimpleNamespace(admin=admin)
        apis: Any = self
        image: Any = lambda: self  # noqa: E731
        config: Any = None
        self.handlers = AdminApis(apis, services, config, image).handlers

    def resource_configs(self, kind: int, name: str) -> dict[str, str]:
        return {"cleanup.policy": "delete,compact", "retention.ms": "1"} if self.heard else {}

    def permit(self, *_: object) -> None:
        pass

    async def call(self, _: str, method: str, request: admin_pb2.AlterConfigsRequest, who: Caller) -> None:
        assert method == "AlterConfigs"
        self.altered.append(request)

    async def unchecked(self, method: str, request: Any) -> Any:
        if method == "DescribeCluster":
            self.heard = self.heard or request.linearizable
            return None
        value = "delete,compact" if self.heard else "delete"
        return admin_pb2.DescribeConfigsResponse(entries=[admin_pb2.ConfigEntry(key="cleanup.policy", value=value)])

    def alter(self, key: int, configs: list[dict[str, object]]) -> admin_pb2.AlterConfigsRequest:
        """Ask for a change of a topic's configs, and return the broker's requests to the controllers."""
        resource = {"resource_type": 2, "resource_name": "t", "configs": configs}
        request = {"resources": [resource], "validate_only": False}

        async def ask() -> Any:
            return await self.handlers[key](request, 1, Caller())

        (answer,) = asyncio.run(ask())["responses"]
        assert answer["error_code"] == 0, answer
        (altered,) = self.altered
        return altered


@pytest.mark.parametrize(
    ("operation", "value", "expected"),
    [(APPEND, "x", "delete,compact,x"), (SUBTRACT, "delete", "compact")],
)
def test_a_list_is_changed_from_what_it_is_now(operation: int, value: str, expected: str) -> None:
    config = {"name": "cleanup.policy", "config_operation": operation, "value": value}
    assert dict(Late().alter(INCREMENTAL_ALTER_CONFIGS, [config]).set) == {"cleanup.policy": expected}


def test_configs_that_another_broker_has_set_are_replaced() -> None:
    altered = Late().alter(ALTER_CONFIGS, [{"name": "cleanup.policy", "value": "compact"}])
    assert dict(altered.set) == {"cleanup.policy": "compact"}
    assert altered.unset == ["retention.ms"]


def test_deleting_a_config_that_does_not_exist_changes_nothing() -> None:
    """As with Kafka's brokers. MirrorMaker 2 deletes every topic config that its source has at the default."""
    never, other = ("segment.jitter.ms", "retention.ms")
    names = (never, other, never)
    deleted: list[dict[str, object]] = [{"name": name, "config_operation": DELETE, "value": None} for name in names]
    changed = {"name": "cleanup.policy", "config_operation": SET, "value": "compact"}
    altered = Late().alter(INCREMENTAL_ALTER_CONFIGS, [*deleted, changed])
    assert altered.unset == ["retention.ms"]
    assert dict(altered.set) == {"cleanup.policy": "compact"}
