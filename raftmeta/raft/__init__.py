"""Raft for the metadata quorum: PySyncObj as the engine, with what it leaves open closed around it.

A node is `RaftNode`; it has no thread and no clock of its own: its owner calls `cycle` and carries messages. Only this
package imports pysyncobj (`engine` says what of it is used, and checks that at import).
"""
