"""Raft for the metadata quorum, with PySyncObj as the engine in `consensus.py`; only it and `wal.py` import it.

node.py         `RaftNode`: proposals, reads, messages; its owner calls `cycle` and carries messages
consensus.py    the interface to PySyncObj, checked at import
elections.py    pre-votes, votes, handing leadership over
replication.py  entries and snapshots to followers
wal.py, snapshots.py, voters.py   log, snapshots and voters on the disk
messages.py, ports.py   the messages; what a node needs from outside
"""
