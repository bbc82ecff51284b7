"""How a broker becomes part of the cluster: its registration, repeated while an earlier process may still be alive."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from raftlog.errors import DuplicateBrokerRegistration
from raftlog.v1.records_pb2 import MetadataCommand, RegisterBrokerCommand
from raftmeta.features import supported_ranges
from raftmeta.port import MetadataPort

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.25
LAST_RETRY_S: Final = 2.0
"""Every attempt is an entry in the metadata log."""
PATIENCE_SESSIONS: Final = 2
"""A controller that is elected meanwhile gives the earlier process a session of its own."""
PATIENCE_MARGIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Registration:
    """What a broker says of itself. `lock_identity`: see that module.

    `directory_id`: of its first log directory that works, `other_directory_ids`: of the others that do.

    `previous_broker_epoch`: from the mark of a clean shutdown; None says that the last stop was not clean.
    The inter-node address may be empty.
    """

    broker_id: int
    host: str
    port: int
    rack: str
    directory_id: bytes
    lock_identity: bytes
    previous_broker_epoch: int | None
    inter_node_host: str = ""
    inter_node_port: int = 0
    other_directory_ids: tuple[bytes, ...] = ()

    def command(self, incarnation_id: bytes) -> MetadataCommand:
        """Return the command that registers this process."""
        return MetadataCommand(
            register_broker=RegisterBrokerCommand(
                broker_id=self.broker_id,
                incarnation_id=incarnation_id,
                host=self.host,
                port=self.port,
                rack=self.rack,
                directory_id=self.directory_id,
                other_directory_ids=self.other_directory_ids,
                lock_identity=self.lock_identity,
                inter_node_host=self.inter_node_host,
                inter_node_port=self.inter_node_port,
                previous_broker_epoch=self.previous_broker_epoch,
                features=supported_ranges(),
            )
        )


async def register(
    metadata: MetadataPort,
    registration: Registration,
    session_timeout_ms: int,
    on_wait: Callable[[str], None] = lambda awaited: None,
) -> int:
    """Register and return the broker epoch; `on_wait` is told what is waited for.

    Raises:
        DuplicateBrokerRegistration: another process with this id stays alive; names its address.
        RaftlogError: refused otherwise.
    """
    loop = asyncio.get_running_loop()
    incarnation_id = uuid.uuid4().bytes
    deadline_s = loop.time() + PATIENCE_SESSIONS * session_timeout_ms / 1000 + PATIENCE_MARGIN_S
    pause_s = 0.0
    while True:
        try:
            result = await metadata.propose(registration.command(incarnation_id))
        except DuplicateBrokerRegistration as error:
            known = metadata.image.brokers.get(registration.broker_id)
            where = f"{known.host}:{known.port}" if known is not None else "an address that is not known here"
            if loop.time() >= deadline_s:
                raise DuplicateBrokerRegistration(
                    f"another process runs as broker {registration.broker_id} at {where} and stays alive; "
                    "stop it, or give this node a node.id and directories of its own"
                ) from error
            if not pause_s:
                on_wait(f"the process that is registered as broker {registration.broker_id} at {where} to lapse")
                logger.warning(
                    "broker %d is registered already, at %s; waiting for that process to lapse",
                    registration.broker_id,
                    where,
                )
            pause_s = min(max(FIRST_RETRY_S, 2 * pause_s), LAST_RETRY_S)
            await asyncio.sleep(max(0.0, min(pause_s, deadline_s - loop.time())))
        else:
            return result.broker_epoch
