"""A node's counters, health, metrics, events and traces.

node.py              the parts of one node, and its HTTP endpoint: `/metrics`, `/livez`, `/readyz`, `/startupz`
counters.py          counters and histograms of the data plane; no I/O, no clock
metrics.py           the metric families, derived from counters and state at each scrape; the catalogue of all
health.py            alive, started, ready, and the reason if not
event_loop.py        how late the event loop is; reports of bugs
group_lag.py         the lag of groups in records and seconds, sampled from the leaders
leader_offsets.py    where partitions begin and end, asked of their leaders
events.py            the names of logged state transitions
tracing.py           spans of calls and of metadata changes, and their exporter
partition_traces.py  spans of records
"""
