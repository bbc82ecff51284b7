"""Settings as they are described: what is secret in them is left out."""

from __future__ import annotations

from broker.config import BrokerConfig
from broker.services.configs import describe_broker, describe_topic
from raftmeta.image import MetadataImage


def test_a_password_in_an_address_is_not_shown() -> None:
    """Who may describe configs need not know it; `DescribeNode` hides it as well."""
    values = {
        "node.id": 1,
        "log.dirs": "/data",
        "tracing.exporter": "otlp",
        "tracing.otlp.endpoint": "http://raftlog:hunter2@collector.example:4317",
        "sasl.users.location": "/etc/raftlog/users.toml",
    }
    entries = {each.key: each for each in describe_broker(MetadataImage(), BrokerConfig.from_values(values))}
    assert entries["tracing.otlp.endpoint"].value == "http://raftlog:[hidden]@collector.example:4317"
    assert entries["sasl.users.location"].value == "/etc/raftlog/users.toml", "where it lies is no secret"
    assert entries["node.id"].value == "1"
    assert "hunter2" not in str(entries)


def test_values_of_topics_are_shown_as_they_are() -> None:
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", "log.retention.ms": "7d"})
    entries = {each.key: each.value for each in describe_topic(MetadataImage(), "t", config)}
    assert entries == dict(config.topic_defaults)
