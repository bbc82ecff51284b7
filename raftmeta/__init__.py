"""The metadata: its quorum, its state machine, and the decisions on topics, replicas and brokers.

image.py, replay.py      the state of the cluster, and how records change it
state.py, decide/        commands become records; the same on every controller
elections.py             partition leaders and ISRs
acls.py, credentials.py  permissions and users
topic_configs.py, features.py   the configs of topics, and the levels of features
raft/                    the replicated log, on PySyncObj
quorum/                  controllers, sessions and leases of brokers, channels between nodes
port.py                  the metadata as brokers use it; disk.py: the disk as the metadata uses it
offline.py               repair and voter changes of a stopped controller
"""
