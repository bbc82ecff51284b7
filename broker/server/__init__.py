"""The process: its roles, its registration and lease, its background work.

server.py            puts the roles together, starts and stops them
broker_role.py       a broker: logs, replicas, coordinators and services, wired
quorum_role.py       a controller, or the way to the controllers
replication_role.py  the streams to and from other brokers
registration.py      the registration with the controller, and the heartbeats that keep it
lease.py             the right to serve, renewed by heartbeats
housekeeping.py      retention, checkpoints and other periodic work
garbage.py           short collections of garbage, however many objects live on
logging.py           the process's log: format, and levels that can be changed while it runs
"""
