"""The SDK's engine on asyncio and gRPC; `raftlog` and `raftlog.aio` are its two faces. Private."""

import os

# gRPC reads this when it is first imported, which is below this package. Without it every broker that stops leaves
# notes of the C library on the application's stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
