"""Deterministic simulation of metadata quorums: virtual time, network, disks and clocks, from one seed.

`tests.simulation.dataplane` has whole brokers around such a quorum, with logs and replication.

Inside run the real parts: Raft node, write-ahead log, snapshot store, voters' directory, state machine, sessions and
leases. What is simulated lies around them, one concept a module:

    scheduler.py    virtual time, and the one source of randomness
    disk.py         a disk that loses what was not synced, by sectors
    network.py      streams that keep their order, and connections that break, stall and deliver late
    process.py      a process on a host: it runs, stands still, is killed
    voter.py        the controller role: drives a Raft node, proposes, reads
    controller.py   what the active controller does: sessions, fencing, elections
    broker.py       the broker role: heartbeats, lease, what it believes to lead, what it acknowledges
    clients.py      who changes topics and reads them
    fault_maker.py  when faults come, by number; how a core is mended first, then the rest
    faults.py       what goes wrong
    invariants.py   what has to hold after every event
    schedule.py     one run from a seed: faults, then a core that goes on alone, then everybody
    plan.py         what a run is told where its seed does not decide
    workloads.py    scenario files (scenarios/*.toml): a workload and its faults, as data
    runner.py       the kinds of simulation, and schedules on all cores
    state.py        what everybody thought when something went wrong
    shrink.py       the least that still fails in the same way
    hours.py        all kinds and scenarios in turn, for hours
    mutations.py    planted bugs, each of which some seed has to catch; mutation_table.py is the page about them
    worlds.py       the simulations of coordinators' cores, and the bugs planted there
    scenario.py     scripted faults, for stories that are told in a test
"""
