"""Transactions and staged batches: the coordinator's pure core, which decides and replays its decisions.

commands ─▶ coordinator ─▶ decisions (transactional ids), staging (sinks) ─▶ records ─▶ replay ─▶ transaction, sink
                       └─▶ markers: what was decided, and is still to be told to partitions and groups
"""
