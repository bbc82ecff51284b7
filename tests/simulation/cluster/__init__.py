"""Deterministic simulation of a whole cluster with the SDK as it ships: real clients, real services, one seed.

Around the brokers of `tests.simulation.dataplane` lies a simulated gRPC. Its servers host the services of
`broker.net.services`, its channels are what `raftlog._client.connections` opens; what travels between are bytes on
simulated connections. The applications are coroutines that use `raftlog.aio` as anybody would. One concept a module:

    frames.py         what travels on a connection: calls, messages, their windows, and how they end
    channel.py        a `grpc.aio.Channel`: connecting, and what becomes of calls meanwhile
    calls.py          calls: messages, deadlines, cancelling
    server.py         a `grpc.aio.Server`: handlers, contexts, streams
    surroundings.py   clocks, ids and channels of the process that runs
    metadata.py       the metadata quorum as services see it
    broker.py         a whole broker behind such a server
    watch.py          answers to producers and consumers, looked at when they leave
    client.py         a process that runs an application, and one life of it after the other
    book.py           what applications were told, and what has to have come of it
    ledger.py         what has to hold for records whose producers may repeat themselves
    offsets.py        what groups were given and have committed
    producers.py      applications that produce
    readers.py        applications that read by `assign`
    members.py        applications that read as members of groups
    transactions.py   a bank, and transformers
    deals.py          transactions and stages: all of one, or nothing
    sinks.py          batch writers with stages
    admins.py         clients that create, change and delete topics
    faults.py         what goes wrong for clients besides
    schedule.py       one run from a seed
    mutations.py      planted bugs of the SDK
"""
