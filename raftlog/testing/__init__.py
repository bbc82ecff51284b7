"""A real cluster for anyone's tests: server processes on loopback that can be killed, paused and started again.

    from raftlog.testing import Cluster

    with Cluster() as cluster:
        producer = raftlog.Producer(cluster.bootstrap)

The pytest fixture `raftlog_cluster` is one such cluster for a test; it comes with the package.
"""

from raftlog.testing.certificates import CertificateAuthority
from raftlog.testing.cluster import Cluster
from raftlog.testing.server_process import ServerFailed

__all__ = ["CertificateAuthority", "Cluster", "ServerFailed"]
