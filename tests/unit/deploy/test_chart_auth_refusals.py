"""What the chart does not render about users and permissions, and what it says then."""

from __future__ import annotations

import pytest

from tests.support.chart import ACLS, ADMIN, AUTH, TLS, WITH_ACLS, Render, Values, renderer


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    return renderer(tmp_path_factory.mktemp("values"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"auth": AUTH}, "auth.enabled needs tls.enabled"),
        ({"tls": {**TLS, "migration": "switch"}, "auth": AUTH}, "end that migration first"),
        ({"tls": TLS, "auth": {"enabled": True}}, "auth.admin.user and auth.admin.secret are needed"),
        (
            {"tls": TLS, "auth": {"enabled": True, "admin": {"user": "root"}}},
            "auth.admin.user and auth.admin.secret are needed",
        ),
        ({"auth": {"migration": "prepare"}}, "auth.migration is prepare, and auth.enabled is false"),
        ({"auth": {"admin": ADMIN}}, "nobody would be asked for a password"),
        ({"auth": {"authorizer": "acl"}}, "auth.authorizer=acl needs users"),
        (
            {"tls": {**TLS, "clientAuth": "none"}, "auth": {"authorizer": "acl", "admin": {"user": "x"}}},
            "auth.authorizer=acl needs users",
        ),
        (
            {"tls": {**TLS, "migration": "switch"}, "auth": {"authorizer": "acl", "admin": {"user": "x"}}},
            "auth.authorizer=acl needs users",
        ),
        (
            {
                "tls": {**TLS, "clientAuth": "none"},
                "auth": {**WITH_ACLS, "migration": "prepare"},
            },
            "auth.authorizer=acl needs users",
        ),
        ({"tls": TLS, "auth": {"authorizer": "acl"}}, "auth.admin.user is empty"),
        ({"tls": TLS, "auth": {"superUsers": ["User:a"]}}, "auth.superUsers are named, and auth.authorizer is none"),
        ({"auth": {"superUsers": ["a"]}}, "does not match pattern"),
        ({"auth": {"superUsers": ["User:*"]}}, "does not match pattern"),
        ({"auth": {"superUsers": ["User:ANONYMOUS"]}}, "auth.superUsers.0"),
        ({"auth": {"admin": {"password": "secret"}}}, "additional properties 'password' not allowed"),
        ({"auth": {"admin": {"user": "../x"}}}, "does not match pattern"),
        ({"auth": {"mechanisms": []}}, "auth.mechanisms"),
        ({"auth": {"mechanisms": ["PLAIN"]}}, "auth.mechanisms.0"),
        ({"auth": {"authorizer": "simple"}}, "auth.authorizer"),
        ({"users": [{"name": "a", "password": "b"}]}, "additional properties 'password' not allowed"),
        ({"users": [{"name": "a"}]}, "missing property 'secret'"),
        ({"users": [{"name": "a/b", "secret": "s"}]}, "does not match pattern"),
        ({"users": [{"name": "a", "secret": "s", "iterations": 100}]}, "users.0.iterations"),
        ({"users": [{"name": "a", "secret": "s"}] * 2}, "users: a is there twice"),
        ({"tls": TLS, "auth": AUTH, "users": [{"name": "root", "secret": "s"}]}, "users: root is auth.admin"),
        (
            {"tls": TLS, "auth": AUTH, "users": [{"name": "a", "secret": "s", "mechanism": "SCRAM-SHA-256"}]},
            "not one of auth.mechanisms",
        ),
        (ACLS, "acls are listed, and auth.authorizer is none"),
        (
            {
                "tls": TLS,
                "auth": WITH_ACLS,
                "acls": [{"principal": "User:a", "operations": ["Read"], "resource": {"type": "topic"}}],
            },
            "has no resource.name",
        ),
        ({"acls": [{"principal": "a", "operations": ["Read"], "resource": {"type": "cluster"}}]}, "acls.0.principal"),
        (
            {"acls": [{"principal": "User:a", "operations": ["Reed"], "resource": {"type": "cluster"}}]},
            "acls.0.operations.0",
        ),
        (
            {"acls": [{"principal": "User:a", "operations": ["Read"], "resource": {"type": "cluster", "x": 1}}]},
            "additional properties 'x' not allowed",
        ),
        (
            {
                "tls": TLS,
                "auth": WITH_ACLS,
                "acls": [{"principal": "User:a", "operations": ["All"], "resource": {"type": "cluster", "name": "c"}}],
            },
            "leave resource.name and resource.pattern out",
        ),
        ({"job": {"pruneAcls": True}}, "would remove every ACL"),
        ({"config": {"authorizer": "acl"}}, "config.authorizer is the chart's to write"),
        ({"config": {"super.users": "User:a"}}, "config.super.users is the chart's to write"),
        ({"brokerConfig": {"sasl.users.location": "/x"}}, "brokerConfig.sasl.users.location is the chart's to write"),
    ],
)
def test_users_that_nobody_can_be_and_rights_that_nobody_looks_at_are_not_rendered(
    render: Render, values: Values, reason: str
) -> None:
    with pytest.raises(ValueError) as refused:
        render({"insecure": True, **values})
    assert reason in str(refused.value).replace("/", ".")
