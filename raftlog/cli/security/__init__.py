"""`raftlog acl` and `raftlog user`."""
