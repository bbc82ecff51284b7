"""Why a port cannot be had: gRPC keeps that to itself."""

from __future__ import annotations

import os
import socket


def why_not(host: str, port: int) -> str:
    """Return what the operating system says against listening there."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server((str(address[0]), port), family=family):
            return "gRPC refused it, GRPC_VERBOSITY=DEBUG tells more"
    except OSError as error:
        if error.errno is not None and error.errno > 0:  # else it is of getaddrinfo
            return os.strerror(error.errno).lower()
        return (error.strerror or str(error)).lower()
