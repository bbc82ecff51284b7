"""Deterministic simulation of whole brokers: real logs on virtual disks, real replication over a virtual network.

Around the quorum of `tests.simulation`, each broker has the real log manager, registry, partitions, group commit and
both ends of the replication streams. One concept a module:

    loop.py         an event loop in virtual time, for parts of the product that ask for one
    disk.py         a broker's log directory: what is not synced can be lost, and everything takes time
    streams.py      the real replication sessions, over simulated connections
    broker.py       one life of a whole broker, with coordinators and services
    markers.py      the service `Markers` between brokers, over simulated connections
    messages.py     what clients and brokers say to each other
    clients.py      producers and consumers, and what they were told
    committed.py    what was committed
    ledger.py       what has to hold for records, after every event
    faults.py       what goes wrong besides: slow disks, reassignments, deleted records
    schedule.py     one run from a seed
    mutations.py    planted bugs, each of which some seed or story has to catch
    scenario.py     scripted faults, for stories

and beside these the files of groups (`group_*.py`) and of transactions:

    isolation.py                what transactions have become in one partition
    transaction_ledger.py       what has to hold for transactions, after every event
    transaction_book.py         what clients were told of transactions, and what has to have come of it at the end
    transaction_clients.py      coroutines that call coordinators and read committed records
    transaction_producers.py    producers with a transactional id, and transformers
    transaction_sinks.py        batch writers with stages
    transaction_readers.py      readers of committed records
    transaction_schedule.py     one run from a seed
    transaction_mutations.py    planted bugs
"""
