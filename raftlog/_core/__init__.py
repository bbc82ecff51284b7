"""The SDK's pure cores: no clock, no network, no threads; the shells in `raftlog._client` wait and call these."""
