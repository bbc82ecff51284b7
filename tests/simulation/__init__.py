"""Deterministic simulation of metadata quorums: virtual time, network, disks and clocks, from one seed.

`tests.simulation.dataplane` has whole brokers around such a quorum, with logs and replication.

The Raft node, write-ahead log, snapshot store, voters' directory, state machine, sessions and leases are the real ones.
The modules simulate what is around them, one concept each:

    scheduler.py    virtual time, and the one source of randomness
    disk.py         a disk that loses what was not synced, by sectors
    network.py      streams that keep their order, and connections that break, stall and deliver late
    process.py      a process on a host: it runs, is paused, is killed
    voter.py        the controller role: drives a Raft node, proposes, reads
    controller.py   what the active controller does: sessions, fencing, elections
    broker.py       the broker role: heartbeats, lease, the partitions that it leads by its own image, acknowledgements
    clients.py      clients that change topics and read them
    fault_maker.py  when faults come, by number; how a core is mended first, then the rest
    faults.py       the faults
    invariants.py   checked after every event
    schedule.py     one run from a seed: faults, then only a core of hosts is mended, then all
    plan.py         settings of a run that its seed does not decide
    workloads.py    scenario files (scenarios/*.toml): a workload and its faults, as data
    runner.py       the kinds of simulation, and schedules on all cores
    state.py        the view of each process at a failure, as text
    shrink.py       reduces a failing run to fewer faults that fail in the same way
    hours.py        all kinds and scenarios in turn, for hours
    mutations.py    planted bugs, each of which some seed has to catch; mutation_table.py is the page about them
    worlds.py       the simulations of parts of a broker, such as coordinators' cores, and the bugs planted there
    scenario.py     scripted faults, for stories that are told in a test
"""
