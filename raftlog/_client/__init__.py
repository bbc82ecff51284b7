"""The SDK's engine on asyncio and gRPC; `raftlog` and `raftlog.aio` are its two faces. Private."""

import os

# gRPC reads these variables when it is first imported, which happens below this package. Without the first, the C
# library writes to the application's stderr whenever a broker stops.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# gRPC's own support of forks crashes the child now and then (SIGSEGV in its fork handler). raftlog does not need it: in
# a forked child, a client of the parent refuses every call.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
