"""The server: a broker, a controller, or both in one process.

server/         starts the roles; registration, lease, housekeeping
config/         the configuration keys and their checks
net/            listeners, TLS, gRPC services
kafka/          the listener for Kafka clients
quotas/         rates and shares of users
log/            partition logs on the disk
partition/      a partition as leader or follower; produce and fetch sessions
replicas/       the partitions of this broker, ISR changes
coordinator/    consumer groups and transactions
security/       authentication, ACLs, audit
observability/  metrics, tracing, health
clock.py        the clock that the rest is given
turns.py        how long work leaves the event loop to others
descriptors.py  what each use of file descriptors may have
"""
