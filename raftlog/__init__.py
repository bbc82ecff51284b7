"""raftlog."""
