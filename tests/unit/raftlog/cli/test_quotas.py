"""`raftlog quota` on a cluster in memory: what it does, prints and refuses."""

from __future__ import annotations

import pytest

from raftmeta.features import QUOTAS_LEVEL
from raftmeta.quotas import QuotaEntity
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run
from tests.support.metadata import update_feature


@pytest.fixture(autouse=True)
def quotas_are_known(server: AdminServer) -> None:
    server.propose(update_feature("metadata.version", QUOTAS_LEVEL))


def test_quotas_are_set_listed_described_and_removed(server: AdminServer, run: Run) -> None:
    done = run("quota", "set", "--user", "ada", "producer_byte_rate=1000", "request_percentage=2.5")
    assert done.out == "producer_byte_rate, request_percentage of user ada set\n"
    run("quota", "set", "--user-defaults", "--client", "web", "consumer_byte_rate=5")
    run("quota", "set", "--ip", "10.0.0.1", "connection_creation_rate=3")
    assert server.image.quotas == {
        QuotaEntity("ada"): {"producer_byte_rate": 1_000, "request_percentage": 2.5},
        QuotaEntity("", "web"): {"consumer_byte_rate": 5},
        QuotaEntity(ip="10.0.0.1"): {"connection_creation_rate": 3},
    }
    listed = run("quota", "list", "--output", "json").json
    assert {"user": "<default>", "client_id": "web", "ip": None, "quota": "consumer_byte_rate", "value": 5.0} in listed
    assert len(listed) == 4
    assert [row["quota"] for row in run("quota", "list", "--user", "ada", "--output", "json").json] == [
        "producer_byte_rate",
        "request_percentage",
    ]
    described = run("quota", "describe", "--user", "ada", "--client", "web", "--output", "json").json
    assert [(row["quota"], row["value"], row["from"]) for row in described] == [
        ("producer_byte_rate", 1000.0, "user ada"),
        ("consumer_byte_rate", 5.0, "the default user at client id web"),
        ("request_percentage", 2.5, "user ada"),
        ("controller_mutation_rate", None, ""),
    ]
    assert (
        run("quota", "remove", "--user", "ada", "request_percentage").out == "request_percentage of user ada removed\n"
    )
    assert run("quota", "remove", "--user", "ada").out == "producer_byte_rate of user ada removed\n"
    assert QuotaEntity("ada") not in server.image.quotas


def test_a_dry_run_changes_nothing(server: AdminServer, run: Run) -> None:
    assert "would be set" in run("quota", "set", "--user", "ada", "producer_byte_rate=1000", "--dry-run").out
    assert server.image.quotas == {}


def test_a_percentage_that_limits_nothing_is_set_with_a_note(server: AdminServer, run: Run) -> None:
    assert "limits nothing" in run("quota", "set", "--user", "ada", "request_percentage=101").err
    assert "limits nothing" not in run("quota", "set", "--user", "ada", "request_percentage=100").err


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("set", "producer_byte_rate=1"), 2, "name the quota's entity"),
        (("set", "--user", "", "producer_byte_rate=1"), 2, "--user-defaults"),
        (("set", "--user", "a", "--user-defaults", "producer_byte_rate=1"), 2, "not both"),
        (("set", "--user", "a", "producer_byte_rate=fast"), 2, "a quota is a number"),
        (("set", "--user", "a", "producer_byte_rate=-1"), 1, "from 0.001"),
        (("set", "--user", "a", "--ip", "10.0.0.1", "connection_creation_rate=1"), 1, "stands alone"),
        (("remove", "--user", "a"), 1, "user a has no quota"),
        (("remove", "--user", "a", "producer_byte_rate"), 1, "has no quota 'producer_byte_rate'"),
    ],
)
def test_what_is_wrong_is_refused(
    server: AdminServer, run: Run, arguments: tuple[str, ...], code: int, why: str
) -> None:
    refused = run("quota", *arguments)
    assert refused.code == code
    assert why in " ".join(refused.err.replace("│", " ").split())
    assert server.image.quotas == {}
