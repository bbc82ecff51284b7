"""A real Kubernetes of three nodes on this machine: `./dev k8s up|down|status|load|test`.

    build.py      the programs, built from Go modules and cached
    cluster.py    the cluster: its network, certificates, processes, nodes and volumes
    programs/     the Go sources, and the pinned versions

Control plane and nodes are network namespaces that a bridge joins; a node has a mount namespace, cgroups, a containerd
and a kubelet of its own. Nothing is downloaded but Go modules, and images are loaded from the local Docker engine.
"""
