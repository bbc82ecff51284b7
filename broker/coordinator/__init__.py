"""Coordinators: state machines whose log is a partition of an internal topic.

core.py         what a coordinator's core looks like to the frame: replay, decide, effects
records.py      records to a batch and back
loading.py      the log of a partition, read piece by piece
shard.py        one led partition: load, then decide, append, replay; effects leave once they are committed
shards.py       the shards of one internal topic on this broker, as leaderships come and go
"""
