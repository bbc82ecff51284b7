"""Pipelines between raftlog and Spark, each a script of its own: `python spark/examples/backfill.py --help`."""
