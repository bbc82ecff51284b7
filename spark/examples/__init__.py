"""Pipelines between raftlog and Spark, each a separate script: `python spark/examples/backfill.py --help`."""
