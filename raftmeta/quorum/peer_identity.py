"""Which node is at the other end of a call between nodes, by its certificate.

A certificate names a node with the URI `raftlog://node/ID` among its subject alternative names, or several nodes that
share it; one without such a URI by the common name `raftlog-node-ID`. A caller that claims to be a node must have a
certificate that names that node. In plaintext there are no certificates, and claims are accepted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final

import grpc
from grpc import aio

from raftlog._client.connections import refuse
from raftlog.errors import ClusterAuthorizationFailed

logger = logging.getLogger(__name__)

NODE_URI: Final = "raftlog://node/"
NODE_NAME: Final = "raftlog-node-"
_MAX_NODE_ID: Final = (1 << 31) - 1
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_SHOWN: Final = 10

peer_nodes: ContextVar[frozenset[int] | None] = ContextVar("peer_nodes", default=None)
"""The nodes that the certificate names at the other end of the call being served; None: there is no certificate."""


def node_ids_named(uris: Iterable[str], common_names: Iterable[str]) -> frozenset[int]:
    """Return the nodes that a certificate names."""
    of_uris = [uri.removeprefix(NODE_URI) for uri in uris if uri.startswith(NODE_URI)]
    numbers = of_uris or [name.removeprefix(NODE_NAME) for name in common_names if name.startswith(NODE_NAME)]
    ids = (int(number) for number in numbers if _NUMBER.fullmatch(number))
    return frozenset(node_id for node_id in ids if node_id <= _MAX_NODE_ID)


def node_ids_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[int] | None:
    """Return the nodes that the peer's certificate names, from what gRPC tells of a call; None: it is in plaintext."""
    if b"ssl" not in auth_context.get("transport_security_type", ()):
        return None
    uris, names = (
        [value.decode("utf-8", "replace") for value in auth_context.get(key, ())]
        for key in ("peer_uri", "x509_common_name")
    )
    return node_ids_named(uris, names)


def check_claim(node_id: int) -> None:
    """Check that the caller's certificate names this node.

    Raises:
        ClusterAuthorizationFailed: it names other nodes.
    """
    nodes = peer_nodes.get()
    if nodes is not None and node_id not in nodes:
        of = ", ".join(map(str, sorted(nodes)[:_SHOWN])) or "none"
        raise ClusterAuthorizationFailed(
            f"this is said to be of node {node_id}, with a certificate of node {of}; issue one with the URI "
            f"{NODE_URI}{node_id} for it, or correct its node.id"
        )


async def refuse_false_claim(context: aio.ServicerContext[Any, Any], node_id: int) -> None:
    """End a call with PERMISSION_DENIED if the caller's certificate does not name this node."""
    try:
        check_claim(node_id)
    except ClusterAuthorizationFailed as error:
        logger.error("refused a call: %s", error, extra={"peer": context.peer()})
        await refuse(context, grpc.StatusCode.PERMISSION_DENIED, error, str(error))
