"""Deterministic simulation of a whole cluster with the SDK as it ships: real clients, real services, one seed.

Around the brokers of `tests.simulation.dataplane` lies a simulated gRPC. Its servers host the services of
`broker.net.services`, `raftlog._client.connections` opens its channels, and the bytes between them travel on simulated
connections. The applications are coroutines that use `raftlog.aio` as any application does. One concept a module:

    frames.py         the frames on a connection: calls, messages, their windows, and how they end
    channel.py        a `grpc.aio.Channel`: connecting, and calls that wait for it
    calls.py          calls: messages, deadlines, cancelling
    server.py         a `grpc.aio.Server`: handlers, contexts, streams
    surroundings.py   clocks, ids and channels of the process that runs
    metadata.py       the metadata quorum as services see it
    broker.py         a whole broker behind such a server
    watch.py          answers to producers and consumers, looked at when they leave
    client.py         a process that runs an application, and one life of it after the other
    book.py           the answers that applications got, and checks of the outcome
    ledger.py         invariants of records whose producers may repeat them
    offsets.py        the records that groups were given, and their commits
    producers.py      applications that produce
    readers.py        applications that read by `assign`
    members.py        applications that read as members of groups
    transactions.py   a bank, and transformers
    deals.py          transactions and stages: all of one, or nothing
    sinks.py          batch writers with stages
    admins.py         clients that create, change and delete topics
    faults.py         further faults, of clients
    schedule.py       one run from a seed
    mutations.py      planted bugs of the SDK
"""
