"""What the cluster is asked on the driver before any task runs, so that one message says it and not every task's.

Each process asks once for the same options; Spark keeps the driver's Python workers from batch to batch.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from pyspark_raftlog.options import SinkOptions

if TYPE_CHECKING:
    from raftlog import Admin

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0
_MOST: Final = "transaction.max.timeout.ms"
_checked: set[tuple[str, str | None, tuple[tuple[str, str], ...], bool]] = set()
"""What was found to be well; the numbers of batch writes make no difference."""


def check_cluster(options: SinkOptions) -> None:
    """Check that the topic is there, and that the cluster keeps stages for as long as they are to be kept.

    A cluster that does not answer is no reason to refuse: tasks wait for it, for as long as their options say.

    Raises:
        ValueError: no task could write a row; the message says what to do.
    """
    from raftlog import Admin
    from raftlog._client.option_keys import SECURITY_KEYS
    from raftlog.errors import ClusterAuthorizationFailed, RetriableError

    asked = (options.bootstrap, options.topic, options.producer, options.exactly_once)
    if asked in _checked:
        return
    try:
        secured = {key.name for key in SECURITY_KEYS}
        settings = {name: value for name, value in options.producer if name in secured}
        with Admin(options.bootstrap, config=settings) as admin:
            if options.topic is not None:
                _check_topic(admin, options.topic)
            if options.exactly_once:
                with suppress(ClusterAuthorizationFailed):  # who may write need not be allowed to ask; a task finds out
                    _check_timeout(admin, options)
    except (RetriableError, TimeoutError) as error:
        logger.warning("the cluster was not asked whether this query can write to it: %s", error)
        return
    _checked.add(asked)


def _check_topic(admin: Admin, topic: str) -> None:
    from raftlog.errors import UnknownTopicOrPartition

    try:
        admin.describe_topic(topic, timeout=_TIMEOUT_S)
    except UnknownTopicOrPartition:
        raise ValueError(
            f"there is no topic {topic}, and writing does not create it; create it first, for example with: "
            f"raftlog topic create {topic} --partitions 3"
        ) from None


def _check_timeout(admin: Admin, options: SinkOptions) -> None:
    from raftlog._client.stage_options import STAGE_TIMEOUT, StageOptions

    timeout_ms = StageOptions.make(dict(options.producer), {}).timeout_ms
    for broker in admin.describe_cluster(timeout=_TIMEOUT_S).brokers:
        if broker.fenced:
            continue
        found = admin.describe_configs(broker=broker.broker_id, timeout=_TIMEOUT_S).get(_MOST)
        if found is not None and timeout_ms > int(found.value):
            raise ValueError(
                f"{STAGE_TIMEOUT}={timeout_ms} is above {_MOST}={found.value} of broker {broker.broker_id}; set the "
                f"option {STAGE_TIMEOUT} to {found.value} at most, or raise {_MOST} on all brokers"
            )
