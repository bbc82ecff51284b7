"""Transactions and staged batches: the coordinator's core. Pure: it decides, and what it decided is replayed.

commands ─▶ coordinator ─▶ decisions (transactional ids), staging (sinks) ─▶ records ─▶ replay ─▶ transaction, sink
                       └─▶ markers: what was decided, and is still to be told to partitions and groups
"""
