"""Coordinators: state machines whose log is a partition of an internal topic.

core.py              the interface of a coordinator's core: replay, decide, effects; records as batches
shard.py             one led partition: load, then decide, append, replay; effects leave once they are committed
shards.py            the shards of one internal topic on this broker
internal_topics.py   creates the internal topics
groups/              consumer groups
transactions/        transactions of producers, and batches of sinks
"""
