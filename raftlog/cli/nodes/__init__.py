"""Commands about nodes: the cluster, its brokers, its quorum.

cluster.py       `raftlog cluster`: describe, rebalance, features
brokers.py       `raftlog broker`; draining.py and decommission.py hold its longer commands
quorum.py        `raftlog quorum`: the files of stopped controllers
"""
