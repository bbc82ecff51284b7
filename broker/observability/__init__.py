"""What a node tells of itself: counters that the data plane keeps, health, and the HTTP endpoint for both.

counters.py     what is counted where it happens; no I/O, no clock
health.py       alive, started, ready, and why not
broker_families.py, load_families.py, quorum_families.py, group_families.py
                figures that are derived when somebody asks; catalogue.py: all of them, without values
group_lag.py    how far groups are behind: gathered now and then, from leaders (leader_offsets.py)
watermark_history.py    when a high watermark was where: lag in seconds
election_counter.py     leader changes, on the node that decides on them
events.py       names of the transitions that are logged
http.py         `/metrics`, `/livez`, `/readyz`, `/startupz`
timing.py       how long calls take, for every method that is one request and one response
tracing.py      spans of calls and of metadata changes, where they go; partition_traces.py: those of records
"""
