"""What a support bundle gets besides the cluster's answers: figures from metrics listeners, ends of local logs."""

from __future__ import annotations

import http.client
import os
import socket
from pathlib import Path
from typing import Final

from raftlog._descriptions import BrokerDescription, QuorumDescription
from raftlog._node_descriptions import NodeDescription

METRICS_S: Final = 5.0
METRICS_BYTES: Final = 64 << 20
LOG_BYTES: Final = 4 << 20
"""At most so much of a log's end is read."""
_ANY: Final = ("", "0.0.0.0", "::", "[::]")


def metrics_address(
    node: NodeDescription, broker: BrokerDescription | None, quorum: QuorumDescription | None
) -> tuple[str, int] | None:
    """Return where a node's metrics are; None: it has no such listener. One on all addresses is at the node's host."""
    host, _, port = node.metrics_listener.rpartition(":")
    if not port:
        return None
    if host in _ANY:
        voters = {voter.node_id: voter.host for voter in quorum.voters} if quorum is not None else {}
        host = broker.host if broker is not None else voters.get(node.node_id, "") or node.hostname
    return host.strip("[]"), int(port)


def read_metrics(host: str, port: int) -> bytes:
    """Return what a node tells Prometheus.

    Raises:
        OSError, http.client.HTTPException: it does not answer, or not with that; says why.
    """
    connection = http.client.HTTPConnection(host, port, timeout=METRICS_S)
    try:
        connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
        response = connection.getresponse()
        body = response.read(METRICS_BYTES)
        if response.status != http.client.OK:
            raise OSError(f"http://{host}:{port}/metrics answers with status {response.status}")
        return body
    finally:
        connection.close()


def local_log(node: NodeDescription) -> Path | None:
    """Return a node's log where it is a file of this machine; None: it is elsewhere, or goes to no file.

    What a node says of itself is not enough to have a file of this machine read: the process that it names has to have
    this file as its standard error.

    Raises:
        OSError: the process is one of another user, or gone.
    """
    if not node.log_file or node.hostname != socket.gethostname():
        return None
    path = os.readlink(f"/proc/{node.pid}/fd/2")
    if path != node.log_file:
        raise OSError(f"process {node.pid} of this machine does not log to {node.log_file}")
    return Path(path)


def last_lines(path: Path, lines: int) -> list[str]:
    """Return the last lines of a text file, of its last `LOG_BYTES` at most.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        text = file.read(LOG_BYTES).decode(errors="backslashreplace")
    found = text.splitlines()
    if size > LOG_BYTES:
        del found[:1]  # the rest of a line
    return found[-lines:]
