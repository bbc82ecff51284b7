"""The SDK's engine on asyncio and gRPC; `raftlog` and `raftlog.aio` are its two faces. Private."""

import os

# gRPC reads these when it is first imported, which is below this package. Without the first every broker that stops
# leaves notes of the C library on the application's stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# gRPC's own support of forks crashes the child now and then (SIGSEGV in its fork handler). Nothing here needs it: a
# client that was taken over a fork refuses by itself.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
