"""The listener for Kafka clients: Kafka's wire protocol in front of what the gRPC services call.

    listener.py        connections: framing, bounds, the order of requests and responses
    sasl.py            how connections get in: TLS, certificates, passwords
    apis.py            one method for each API, and its permissions; calls the gRPC services' methods
    groups.py          groups, and members of classic ones
    consumer_groups.py members that let the coordinator assign (KIP-848)
    acls_and_users.py  ACLs, SCRAM credentials and quotas
    produce.py         Produce; fetch.py: Fetch; they call `Partition`
    transactions.py    producer ids and transactions
    admin.py           configs, elections, reassignments, log directories, the quorum
    record_batches.py  record batches: Kafka's format at the edge, format 1 within
    parts.py           requests that name many things
    errors.py          Kafka's error codes
    messages.py        the table of messages and offered versions; codec.py: decodes and encodes by it

docs/kafka.md has the table of APIs. Nothing outside of this package knows Kafka's protocol.
"""
