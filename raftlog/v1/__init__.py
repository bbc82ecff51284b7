"""Generated protobuf and gRPC code of the wire contract `raftlog.v1`; `./dev proto` writes it from `proto/`."""
