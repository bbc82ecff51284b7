"""DescribeConfigs: the value in effect, but for secrets in it, and where it comes from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from broker.config import BrokerConfig
from broker.config_keys import BROKER_CONFIGS
from raftlog._core.redaction import shown
from raftlog.config import ConfigKey
from raftlog.v1.admin_pb2 import ConfigEntry
from raftlog.v1.records_pb2 import ConfigResource
from raftmeta.image import CLUSTER_DEFAULT, MetadataImage
from raftmeta.topic_configs import BROKER_KEY_BY_TOPIC_KEY, DYNAMIC_BROKER_CONFIGS, TOPIC_CONFIGS


def describe_topic(image: MetadataImage, topic: str, config: BrokerConfig) -> Iterator[ConfigEntry]:
    """Yield every topic key: the topic's own value, else the broker's dynamic one, its file's, the default."""
    own = image.resource_configs(ConfigResource.TOPIC, topic)
    effective = {**config.topic_defaults, **image.topic_configs(topic, config.node_id)}
    dynamic = image.broker_configs(config.node_id)
    for key in TOPIC_CONFIGS:
        broker_key = BROKER_KEY_BY_TOPIC_KEY.get(key.name, "")
        if key.name in own:
            source = ConfigEntry.DYNAMIC_TOPIC
        else:
            source = _broker_source(broker_key, dynamic, config.static_keys)
        yield _entry(key, effective[key.name], source)


def describe_broker(image: MetadataImage, config: BrokerConfig) -> Iterator[ConfigEntry]:
    """Yield every server key of this broker."""
    dynamic = image.broker_configs(config.node_id)
    for key in BROKER_CONFIGS:
        value = dynamic.get(key.name, key.format(config.values[key.name]))
        yield _entry(key, value, _broker_source(key.name, dynamic, config.static_keys))


def describe_cluster_default(image: MetadataImage) -> Iterator[ConfigEntry]:
    """Yield the keys that can be set for all brokers at once."""
    dynamic = image.resource_configs(ConfigResource.BROKER, CLUSTER_DEFAULT)
    for key in DYNAMIC_BROKER_CONFIGS:
        yield _entry(
            key, dynamic.get(key.name, key.format(key.default)), _broker_source(key.name, dynamic, frozenset())
        )


def _broker_source(
    broker_key: str, dynamic: Mapping[str, str], static_keys: frozenset[str]
) -> ConfigEntry.Source.ValueType:
    if broker_key in dynamic:
        return ConfigEntry.DYNAMIC_BROKER
    return ConfigEntry.STATIC_BROKER if broker_key in static_keys else ConfigEntry.DEFAULT


def _entry(key: ConfigKey, value: str, source: ConfigEntry.Source.ValueType) -> ConfigEntry:
    return ConfigEntry(
        key=key.name,
        value=shown(key.name, value),
        source=source,
        read_only=not key.dynamic,
        documentation=key.doc,
    )
