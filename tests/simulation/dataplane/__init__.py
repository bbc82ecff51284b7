"""Deterministic simulation of whole brokers: real logs on virtual disks, real replication over a virtual network.

Around the quorum of `tests.simulation`, each broker has the real log manager, registry, partitions, group commit and
both ends of the replication streams. One concept a module:

    loop.py         an event loop in virtual time, for parts of the product that ask for one
    disk.py         a broker's log directory: what is not synced can be lost, and everything takes time
    streams.py      the real replication sessions, over simulated connections
    broker.py       one life of a whole broker, with coordinators and services
    markers.py      the service `Markers` between brokers, over simulated connections
    messages.py     the messages between clients and brokers
    clients.py      producers and consumers, and the answers that they got
    committed.py    the committed records of a partition
    ledger.py       invariants of records, checked after every event
    faults.py       further faults: slow disks, reassignments, deleted records
    schedule.py     one run from a seed
    mutations.py    planted bugs, each of which some seed or story has to catch
    scenario.py     scripted faults, for stories

and beside these the files of groups (`group_*.py`) and of transactions:

    isolation.py                the state of transactions in one partition
    transaction_ledger.py       invariants of transactions, checked after every event
    transaction_book.py         the answers about transactions that clients got, and checks of the outcome
    transaction_clients.py      coroutines that call coordinators and read committed records
    transaction_producers.py    producers with a transactional id, and transformers
    transaction_sinks.py        batch writers with stages
    transaction_readers.py      readers of committed records
    transaction_schedule.py     one run from a seed
    transaction_mutations.py    planted bugs
"""
