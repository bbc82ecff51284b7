"""The shell around the Raft core: controllers, brokers' leases, and how either is reached."""
