"""One partition on this broker: what a leader and a follower do, and the client streams that reach it.

partition.py         `Partition`: roles, produce, fetch, markers, followers
leader_term.py       one term as its leader
follower_term.py     one term as a follower, truncations off the event loop
produce_session.py   one Produce stream
fetch_session.py     one Fetch stream
"""
