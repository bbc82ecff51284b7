"""The SDK's engine on asyncio and gRPC; `raftlog` and `raftlog.aio` are its two faces. Private."""
