"""The server: a broker, a controller, or both in one process.

server/         starts the roles; registration, lease, housekeeping
config/         the configuration keys and their checks
net/            listeners, TLS, gRPC services
log/            partition logs on the disk
partition/      a partition as leader or follower; produce and fetch sessions
replicas/       the partitions of this broker, ISR changes
coordinator/    consumer groups and transactions
security/       authentication, ACLs, audit
observability/  metrics, tracing, health
"""
