"""Users and permissions as the SDK has them, beside what travels and what servers read."""

from __future__ import annotations

import enum
import stat
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import scramp
from hypothesis import given
from hypothesis import strategies as st

from raftlog import security
from raftlog._client.admin import _acl, _binding, credential
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import InvalidConfig, InvalidRequestError, UnacceptableCredential
from raftlog.security import AclBinding, AclFilter, ScramMechanism
from raftlog.testing import Cluster
from raftlog.testing.layout import write_users
from raftlog.v1 import security_pb2
from raftlog.v1.security_pb2 import Acl


@pytest.mark.parametrize(
    ("ours", "wire", "suffix"),
    [
        (security.ResourceType, Acl.ResourceType, "_RESOURCE"),
        (security.PatternType, Acl.PatternType, "_PATTERN"),
        (security.AclOperation, Acl.Operation, "_OPERATION"),
        (security.AclPermission, Acl.Permission, "_PERMISSION"),
        (security.ScramMechanism, security_pb2.ScramMechanism, ""),
    ],
)
def test_names_and_numbers_are_those_that_travel(ours: type[enum.IntEnum], wire: Any, suffix: str) -> None:
    travelling = {name: number for name, number in wire.items() if number}  # 0: unknown
    assert {f"ANY{suffix}" if each.name == "ANY" else each.name: each.value for each in ours} == travelling


def test_the_cluster_has_one_name() -> None:
    assert security.CLUSTER_NAME == CLUSTER_NAME


def test_mechanisms_by_name() -> None:
    assert ScramMechanism.of("SCRAM-SHA-256") is ScramMechanism.of("scram_sha_256") is ScramMechanism.SCRAM_SHA_256
    assert ScramMechanism.of(ScramMechanism.SCRAM_SHA_512).mechanism_name == "SCRAM-SHA-512"
    with pytest.raises(InvalidConfig, match="'PLAIN'; there are SCRAM-SHA-256, SCRAM-SHA-512"):
        ScramMechanism.of("PLAIN")


@given(
    binding=st.builds(
        AclBinding,
        st.text(),
        st.sampled_from(security.AclOperation),
        st.sampled_from(security.ResourceType),
        st.text(),
        st.sampled_from(security.PatternType),
        st.sampled_from(security.AclPermission),
        st.text(),
    )
)
def test_bindings_travel(binding: AclBinding) -> None:
    assert _binding(_acl(binding)) == binding


def test_what_a_filter_leaves_open_travels_as_any() -> None:
    assert _acl(AclFilter()) == Acl(
        resource_type=Acl.ANY_RESOURCE,
        pattern_type=Acl.ANY_PATTERN,
        operation=Acl.ANY_OPERATION,
        permission=Acl.ANY_PERMISSION,
    )


def test_fields_in_a_wrong_order_are_named() -> None:
    mixed_up: Any = AclBinding
    with pytest.raises(InvalidRequestError, match="'User:ada' is no ResourceType: expected one of ANY, TOPIC, GROUP"):
        _acl(mixed_up(security.ResourceType.TOPIC, security.AclOperation.READ, "User:ada", "orders"))
    with pytest.raises(InvalidRequestError, match="'read' is no AclOperation"):
        _acl(AclFilter(operation=cast(Any, "read")))


@pytest.mark.parametrize("mechanism", list(ScramMechanism))
def test_a_credential_checks_its_password(mechanism: ScramMechanism) -> None:
    made = credential("ada", "pencil", mechanism, 4096)
    assert b"pencil" not in made.SerializeToString()
    assert made.salt != credential("ada", "pencil", mechanism, 4096).salt
    for password, right in (("pencil", True), ("pen", False)):
        name = mechanism.mechanism_name
        client = scramp.ScramClient([name], "ada", password)
        kept = (made.salt, made.stored_key, made.server_key, made.iterations)
        server = scramp.ScramMechanism(name).make_server(lambda user, kept=kept: kept)
        server.set_client_first(client.get_client_first())
        client.set_server_first(server.get_server_first())
        if right:
            server.set_client_final(client.get_client_final())
            client.set_server_final(server.get_server_final())
        else:
            with pytest.raises(scramp.ScramException):
                server.set_client_final(client.get_client_final())


@pytest.mark.parametrize(("password", "iterations"), [("", 8192), ("x", 4095), ("x", 1_000_001), ("hush\u0007", 8192)])
def test_what_cannot_be_a_credential_is_refused_without_the_password(password: str, iterations: int) -> None:
    with pytest.raises(UnacceptableCredential, match="'ada'") as caught:
        credential("ada", password, ScramMechanism.SCRAM_SHA_512, iterations)
    assert "hush" not in str(caught.value)


# Clusters for tests


@given(users=st.dictionaries(st.text(min_size=1), st.text(min_size=1), max_size=4))
def test_users_are_written_as_servers_read_them(
    tmp_path_factory: pytest.TempPathFactory, users: dict[str, str]
) -> None:
    file = write_users(tmp_path_factory.mktemp("users") / "users.toml", users)
    assert tomllib.loads(file.read_text(encoding="utf-8")) == users
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_cluster_with_users_is_one_with_tls(tmp_path: Path) -> None:
    made = Cluster(directory=tmp_path, users={"admin": "a", "ada": "b"})
    assert made.client_config["sasl.username"] == "admin"
    assert made.client_config_of("ada") == {
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": str(tmp_path / "tls" / "ca.pem"),
        "sasl.username": "ada",
        "sasl.password": "b",
    }
    assert made.client_config_of("eve", "c")["sasl.password"] == "c"
    with pytest.raises(InvalidConfig, match="was not created with user 'eve'"):
        made.client_config_of("eve")
