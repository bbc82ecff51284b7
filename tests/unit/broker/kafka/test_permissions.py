"""Every API has its permissions declared, by rules that gRPC's listener has."""

from __future__ import annotations

import pytest

from broker.kafka.apis import ANYBODY, PERMISSIONS
from broker.kafka.messages import AUTHENTICATING, REQUESTS, api_name
from broker.security.permissions import RULES


@pytest.mark.parametrize("key", REQUESTS, ids=api_name)
def test_every_api_has_its_permissions_declared(key: int) -> None:
    assert key in PERMISSIONS, f"{api_name(key)} has no permissions declared; see broker/kafka/apis.py"
    assert (PERMISSIONS[key] == ANYBODY) == (key in AUTHENTICATING)
    for method in PERMISSIONS[key]:
        assert f"/raftlog.v1.{method}" in RULES


def test_nothing_is_declared_that_is_not_offered() -> None:
    assert PERMISSIONS.keys() == REQUESTS.keys()
