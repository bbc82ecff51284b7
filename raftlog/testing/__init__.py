"""A real cluster for tests: server processes on loopback that can be killed, paused and started again.

    from raftlog.testing import Cluster

    with Cluster() as cluster:
        producer = raftlog.Producer(cluster.bootstrap)

The package installs two pytest fixtures: `raftlog_cluster` gives a test such a cluster of its own,
`raftlog_session_cluster` one for all tests of a run, which starts once. Starting a cluster needs the extra
`raftlog[server]`; with TLS, `raftlog[testing]`.
"""

from raftlog.testing.certificates import CertificateAuthority
from raftlog.testing.cluster import Cluster
from raftlog.testing.server_process import ServerFailed

__all__ = ["CertificateAuthority", "Cluster", "ServerFailed"]
