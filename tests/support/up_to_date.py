"""Brokers hear of a change one after the other: this waits until answers include all acknowledged changes."""

from __future__ import annotations

import time
from typing import Any

import grpc

from raftlog import Admin
from raftlog.errors import RaftlogError, from_wire
from raftlog.testing import Cluster
from raftlog.v1 import metadata_pb2, metadata_pb2_grpc

_WAIT_S = 60.0


def up_to_date(admin: Admin) -> Admin:
    """Return the client; its next answers include every change that was acknowledged before."""
    admin.describe_cluster(linearizable=True)
    return admin


def heard_everywhere(cluster: Cluster) -> None:
    """Return once every broker of the cluster, which all run, knows of all changes that were acknowledged before."""
    with Admin(cluster.bootstrap) as admin:
        offset = admin.describe_cluster(linearizable=True).metadata_offset
    request = metadata_pb2.MetadataRequest(topics=[], min_metadata_offset=offset)
    deadline_s = time.monotonic() + _WAIT_S
    for address in cluster.bootstrap.split(","):
        with grpc.insecure_channel(address) as channel:
            stub: Any = metadata_pb2_grpc.MetadataStub(channel)  # type: ignore[no-untyped-call,unused-ignore] # generated
            while (error := _refusal(stub, request)) is not None:
                assert time.monotonic() < deadline_s, (
                    f"{address} has not reached metadata offset {offset} within {_WAIT_S:g} s: {error}"
                )
                time.sleep(0.05)


def _refusal(stub: Any, request: metadata_pb2.MetadataRequest) -> RaftlogError | grpc.RpcError | None:
    try:
        answer = stub.Get(request, timeout=_WAIT_S, wait_for_ready=True)
    except grpc.RpcError as error:
        return error
    return from_wire(answer.error) if answer.HasField("error") else None
