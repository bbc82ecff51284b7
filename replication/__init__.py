"""How followers keep up with leaders, and which records are committed. Pure, except for `shell/`.

high_watermark.py      the rule by which records are committed; start here
leader.py, isr.py      one term of a leader: its followers' progress and the ISR
leader_epochs.py       where two logs diverge
ports.py               what the two ends of a stream ask of a partition
leader_session.py      the leader's end of a `Replicate` stream
follower_session.py    the follower's end
pacing.py              how catching up gives way to live records, and small live records gather
token_bucket.py        throttling
shell/                 gRPC around the sessions
"""
