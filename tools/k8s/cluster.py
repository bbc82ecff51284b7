"""The cluster: etcd, one control plane, and nodes with kubelet, kube-proxy and containerd, all on this machine.

Everything carries a name by which `down` finds it again, also after a crash of its starter:

    processes     the variable RAFTLOG_K8S in their environment, which the shims of containers inherit
    containers    the cgroup raftlog-k8s-NODE, in every hierarchy
    networks      the namespaces raftlog-k8s-cp and raftlog-k8s-nN, and the machine's own interface rk8s-host
    mounts        mount namespaces that only those processes use, so that the mounts end with them
    files         STATE; the binaries are elsewhere and stay

The machine's own network gets one interface, and routes to pods and services over it. Volumes are directories, made in
advance for each node. A second `up` finds a complete cluster, or removes what is left of one and begins anew.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import io
import ipaddress
import json
import os
import platform
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tools.k8s import build
from tools.progress import Progress, StepFailed

NAME: Final = "raftlog-k8s"
STATE: Final = build.CACHE / "state"
NODES: Final = ("n1", "n2", "n3")
VOLUMES_PER_NODE: Final = 8
PAUSE_IMAGE: Final = "docker.io/raftlog/pause:1"
POLICIES_IMAGE: Final = "docker.io/raftlog/kube-network-policies:1"
_MARK: Final = "RAFTLOG_K8S"
_NET: Final = "10.200"
_MASTER: Final = f"{_NET}.0.1"
_HOST: Final = f"{_NET}.0.254"
_PODS: Final = f"{_NET}.128.0/17"
_SERVICES: Final = f"{_NET}.64.0/18"
_HOST_INTERFACE: Final = "rk8s-host"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_TOOLS: Final = ("containerd", "ctr", "runc", "iptables", "ip", "nsenter", "unshare")
_PACKAGES: Final = "apt-get install --no-install-recommends containerd runc iptables iproute2 util-linux"
_TO_POLICIES: Final = """-F POSTROUTING
-A POSTROUTING -m owner --uid-owner 0 -j ACCEPT
-A POSTROUTING -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
-A POSTROUTING -j NFQUEUE --queue-num 100 --queue-bypass"""
"""The rules that kube-network-policies makes with nftables, which some kernels cannot (CONFIG_NFT_QUEUE); here it is
asked about every pod."""
_SHARES_OF_NODE: Final = 4
"""Shares of CPU time of the containers of a node together, where one other process of this machine has one. With one
share, event loops in pods were late by up to 5 s beside twenty other processes, and writes paused for up to 19 s."""
_SYSCTLS: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""The kubelet sets these for the whole machine unless it reads that they are set; on a node it reads so."""


class NotHere(StepFailed):
    """This machine cannot run the cluster; the message says what it lacks."""


def problems() -> list[str]:
    """Return what this machine lacks for the cluster."""
    found = []
    if platform.system() != "Linux":
        return [f"the cluster needs Linux, this is {platform.system()}"]
    if os.geteuid() != 0:
        found.append("only root may make network namespaces and containers")
    if not (_CGROUPS / "cgroup.procs").exists() and not any(_CGROUPS.glob("*/cgroup.procs")):
        found.append(f"no cgroups are mounted at {_CGROUPS}")
    elif not os.access(_CGROUPS, os.W_OK):
        found.append(f"{_CGROUPS} is not writable")
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        found.append(f"{', '.join(missing)} missing; on Debian: {_PACKAGES}")
    if not build.is_built():
        unbuildable = build.problem()
        found += [unbuildable] if unbuildable else []
    return found


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


class Cluster:
    """The one cluster of this machine."""

    def __init__(self) -> None:
        self.binaries = build.place()
        self.admin = STATE / "pki" / "admin.conf"

    # The face

    def up(self) -> None:
        """Start the cluster unless it is complete already; return when all nodes are ready.

        Raises:
            NotHere: this machine lacks something.
            StepFailed: a part did not start; the message names its log.
        """
        lacking = problems()
        if lacking:
            raise NotHere("no Kubernetes can run here: " + "; ".join(lacking))
        self.binaries = build.ensure()
        with _alone():
            if self.missing() == []:
                return
            self._remove()
            with Progress("k8s") as progress:
                self._start_all(progress)

    def down(self) -> None:
        """Remove the cluster with its volumes, complete or not."""
        if os.geteuid() != 0:
            raise NotHere("only root may remove the cluster")
        with _alone():
            self._remove()

    def missing(self) -> list[str]:
        """Return the parts that do not run."""
        return [part for part in self._parts() if _pid_of(part) is None]

    def load(self, image: str, name: str | None = None) -> None:
        """Give an image of the local Docker engine to all nodes, under `name`."""
        wanted = name or image
        archive = STATE / "image.tar"
        if wanted != image:
            _run("docker", "tag", image, wanted)
        try:
            _run("docker", "save", "--output", str(archive), wanted)
            for node in NODES:
                self._import(node, archive)
        finally:
            archive.unlink(missing_ok=True)

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator; return its output.

        Raises:
            StepFailed: with `check`, it failed; the message has what it printed.
        """
        return _run(str(self.binaries / "kubectl"), *arguments, stdin=stdin, check=check, env=self.variables())

    def variables(self) -> dict[str, str]:
        """Return the environment in which kubectl and helm find the cluster."""
        path = f"{self.binaries}:{_path()}"
        return {**os.environ, "PATH": path, "KUBECONFIG": str(self.admin)}

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Apply manifests."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(listed))

    def recycle_volumes(self) -> None:
        """Empty the volumes whose claims are gone, and offer them again."""
        listed = json.loads(self.kubectl("get", "pv", "-o", "json"))["items"]
        used = [each["metadata"]["name"] for each in listed if each["status"].get("phase") in ("Released", "Failed")]
        for name in used:
            self.kubectl("delete", "pv", name, "--wait=true")
        self._offer_volumes([name for name in used if _is_ours(name)])

    def offer_small_volume(self, name: str, node: str, size: int) -> None:
        """Offer a volume with a file system of its own on a node, so that it can be full; it ends with the node."""
        directory = STATE / "volumes" / name
        directory.mkdir(exist_ok=True)
        image = directory.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(size)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        on_node = ("nsenter", f"--mount=/proc/{_pid_of(node)}/ns/mnt")
        _run(*on_node, "umount", str(directory), check=False)  # of an earlier one
        _run(*on_node, "mount", "-o", "loop", str(image), str(directory))
        self.apply(_volume(name, node))

    @contextlib.contextmanager
    def policies(self) -> Iterator[None]:
        """Have kube-network-policies decide on every new connection, as the network's plug-in enforces no policy."""
        self._run_policies()
        try:
            for node in NODES:
                _restore_rules(node, _TO_POLICIES)
            yield
        finally:
            for node in NODES:
                _restore_rules(node, "-F POSTROUTING")

    def _run_policies(self) -> None:
        program, name, namespace = build.POLICIES.find_or_build(), build.POLICIES.name, "kube-system"
        archive = STATE / f"{name}.tar"
        _make_image(program, archive, POLICIES_IMAGE)
        for node in NODES:
            self._import(node, archive)
        archive.unlink()
        metadata, labels = {"name": name, "namespace": namespace}, {"app": name}
        container = {
            "name": name,
            "image": POLICIES_IMAGE,
            "args": ["--hostname-override=$(NODE)", "--fail-open", "--netfilter-bug-1766-fix=false"],
            "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            "securityContext": {"privileged": True},
        }
        pod = {"serviceAccountName": name, "hostNetwork": True, "containers": [container]}
        self.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": name},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
                "subjects": [{"kind": "ServiceAccount", **metadata}],
            },
            {
                "apiVersion": "apps/v1",
                "kind": "DaemonSet",
                "metadata": metadata,
                "spec": {
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": pod},
                },
            },
        )
        self.kubectl("-n", namespace, "rollout", "status", f"daemonset/{name}", "--timeout=120s")

    # Faults

    def stop_kubelet(self, node: str) -> None:
        """Stop a node's kubelet; the pods go on."""
        _end([_pid_of(f"{node}-kubelet")], signal.SIGKILL)

    def start_kubelet(self, node: str) -> None:
        """Start a node's kubelet again."""
        self._start_kubelet(node)

    def cut_off(self, node: str, *, off: bool = True) -> None:
        """Take a node, and all of its pods, off the network, or bring it back."""
        _ip("-n", f"{NAME}-cp", "link", "set", f"p-{node}", "down" if off else "up")

    # Its parts

    def _parts(self) -> list[str]:
        of_nodes = [f"{node}{part}" for node in NODES for part in ("", "-containerd", "-kubelet", "-proxy")]
        return ["etcd", "apiserver", "controllers", "scheduler", "dns", *of_nodes]

    def _start_all(self, progress: Progress) -> None:
        for name in ("log", "pki", "volumes"):
            (STATE / name).mkdir(parents=True, exist_ok=True)
        progress.say("network and certificates")
        _make_network()
        _make_certificates()
        _make_image(self.binaries / "pause", STATE / "pause.tar", PAUSE_IMAGE)
        progress.say("control plane")
        self._start_control_plane()
        progress.say("nodes")
        for node in NODES:
            self._start_node(node)
        self._offer_volumes([f"{node}-{number}" for node in NODES for number in range(VOLUMES_PER_NODE)])
        for node in NODES:
            self._until(120, f"node {node}", partial(self.kubectl, "get", "node", node))
        self.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=180s")
        self._until(60, "service account", lambda: self.kubectl("get", "serviceaccount", "default"))
        progress.say(f"three nodes of Kubernetes {build.version_of('k8s.io/kubernetes')} are ready")

    def _start(self, part: str, namespace: str, *command: str, mounts_of: str | None = None) -> None:
        """Start a part in a network namespace, and in the mount namespace of another part."""
        enter = ["nsenter", f"--net=/run/netns/{NAME}-{namespace}"]
        if mounts_of is not None:
            enter.append(f"--mount=/proc/{_pid_of(mounts_of)}/ns/mnt")
        with (STATE / "log" / f"{part}.log").open("ab") as log:
            process = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": _path(), "HOME": os.environ.get("HOME", "/root"), _MARK: part},
            )
        (STATE / f"{part}.pid").write_text(str(process.pid))

    def _until(self, seconds: float, what: str, attempt: Callable[[], object]) -> None:
        end_s = time.monotonic() + seconds
        while True:
            try:
                attempt()
                return
            except StepFailed as error:
                ended = [part for part in self._parts() if _has_ended(part)]
                if ended:
                    said = (STATE / "log" / f"{ended[0]}.log").read_text(errors="replace").strip()[-1000:]
                    raise StepFailed(f"{ended[0]} has ended; the end of its log in {STATE / 'log'}: {said}") from None
                if time.monotonic() > end_s:
                    raise StepFailed(f"no {what} after {seconds:g} s; logs are in {STATE / 'log'}: {error}") from None
            time.sleep(0.3)

    def _start_control_plane(self) -> None:
        pki = STATE / "pki"
        etcd = ("http://127.0.0.1:2379", "http://127.0.0.1:2380")
        self._start(
            "etcd", "cp", str(self.binaries / "etcd"),
            "--data-dir", str(STATE / "etcd"), "--unsafe-no-fsync", "--log-level", "warn",
            "--listen-client-urls", etcd[0], "--advertise-client-urls", etcd[0],
            "--listen-peer-urls", etcd[1], "--initial-advertise-peer-urls", etcd[1],
            "--initial-cluster", f"default={etcd[1]}",
        )  # fmt: skip
        self._start(
            "apiserver", "cp", str(self.binaries / "kube-apiserver"),
            "--etcd-servers", etcd[0], "--bind-address", _MASTER, "--advertise-address", _MASTER,
            "--service-cluster-ip-range", _SERVICES, "--allow-privileged",
            "--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction",
            "--client-ca-file", f"{pki}/ca.crt",
            "--tls-cert-file", f"{pki}/apiserver.crt", "--tls-private-key-file", f"{pki}/apiserver.key",
            "--kubelet-client-certificate", f"{pki}/to-kubelets.crt", "--kubelet-client-key", f"{pki}/to-kubelets.key",
            "--kubelet-preferred-address-types", "InternalIP",
            "--service-account-issuer", "https://kubernetes.default.svc",
            "--service-account-key-file", f"{pki}/accounts.key",
            "--service-account-signing-key-file", f"{pki}/accounts.key",
        )  # fmt: skip
        self._until(120, "API server", lambda: self.kubectl("get", "--raw", "/readyz"))
        self._start(
            "controllers", "cp", str(self.binaries / "kube-controller-manager"),
            "--kubeconfig", f"{pki}/controllers.conf", "--leader-elect=false", "--bind-address", _MASTER,
            "--use-service-account-credentials", "--root-ca-file", f"{pki}/ca.crt",
            "--service-account-private-key-file", f"{pki}/accounts.key",
            "--cluster-signing-cert-file", f"{pki}/ca.crt", "--cluster-signing-key-file", f"{pki}/ca.key",
        )  # fmt: skip
        self._start(
            "scheduler", "cp", str(self.binaries / "kube-scheduler"),
            "--kubeconfig", f"{pki}/scheduler.conf", "--leader-elect=false", "--bind-address", _MASTER,
        )  # fmt: skip
        (STATE / "Corefile").write_text(
            f".:53 {{\n  bind {_MASTER}\n  errors\n  cache 5\n"
            f"  kubernetes cluster.local in-addr.arpa {{\n    kubeconfig {pki}/admin.conf\n    ttl 5\n  }}\n}}\n"
        )
        self._start("dns", "cp", str(self.binaries / "coredns"), "-conf", str(STATE / "Corefile"))

    def _start_node(self, node: str) -> None:
        directory = STATE / node
        for name in ("cni", "containerd", "kubelet", "logs", "plugins", "run"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        # Holds the mount namespace open; what containerd and the kubelet mount ends with the last of the three.
        self._start(node, node, "unshare", "--mount", str(self.binaries / "pause"))
        own = os.readlink("/proc/self/ns/mnt")
        self._until(20, f"mount namespace of {node}", lambda: _check(_namespace_of(_pid_of(node)) not in (own, None)))
        for key, value in _SYSCTLS.items():
            file = directory / "sys" / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
            _run("nsenter", f"--mount=/proc/{_pid_of(node)}/ns/mnt", "mount", "--bind", str(file), f"/proc/sys/{key}")
        _make_cgroups(node)
        self._start_containerd(node)
        self._start_kubelet(node)
        settings = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clusterCIDR": _PODS,
            "hostnameOverride": node,
            "oomScoreAdj": 0,
            "clientConnection": {"kubeconfig": f"{STATE}/pki/proxy.conf"},
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        (directory / "proxy.json").write_text(json.dumps(settings))
        proxy = str(self.binaries / "kube-proxy")
        self._start(f"{node}-proxy", node, proxy, "--config", f"{directory}/proxy.json", mounts_of=node)

    def _start_containerd(self, node: str) -> None:
        directory = STATE / node
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": f"{directory}/addresses",
                        "routes": [{"dst": "0.0.0.0/0"}],
                        "ranges": [[{"subnet": _pods_of(node)}]],
                    },
                }
            ],
        }
        (directory / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        left_out = ", ".join(f'"io.containerd.snapshotter.v1.{name}"' for name in ("aufs", "btrfs", "devmapper", "zfs"))
        (directory / "containerd.toml").write_text(
            f"""version = 2
root = "{directory}/containerd"
state = "{directory}/run"
disabled_plugins = [{left_out}]
[grpc]
address = "{directory}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{directory}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
netns_mounts_under_state_dir = true
restrict_oom_score_adj = true  # runc may not lower it without CAP_SYS_RESOURCE, which some virtual machines withhold
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{self.binaries}/cni"
conf_dir = "{directory}/cni"
"""
        )
        self._start(
            f"{node}-containerd", node, "containerd", "--config", f"{directory}/containerd.toml", mounts_of=node
        )
        self._until(60, f"containerd of {node}", lambda: _run("ctr", "-a", f"{directory}/containerd.sock", "version"))
        self._import(node, STATE / "pause.tar")

    def _import(self, node: str, archive: Path) -> None:
        _run(
            *("ctr", "-a", f"{STATE}/{node}/containerd.sock", "-n", "k8s.io"),
            *("images", "import", "--digests=false", str(archive)),
        )

    def _start_kubelet(self, node: str) -> None:
        directory, pki = STATE / node, STATE / "pki"
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "address": _address_of(node),
            "healthzBindAddress": "127.0.0.1",
            "clusterDNS": [_MASTER],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{NAME}-{node}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "containerRuntimeEndpoint": f"unix://{directory}/containerd.sock",
            "podLogsDir": f"{directory}/logs",
            "volumePluginDir": f"{directory}/plugins",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "5s",
        }
        (directory / "kubelet.json").write_text(json.dumps(settings))
        self._start(
            f"{node}-kubelet", node, str(self.binaries / "kubelet"),
            "--config", f"{directory}/kubelet.json", "--kubeconfig", f"{pki}/{node}.conf",
            "--root-dir", f"{directory}/kubelet", "--cert-dir", f"{directory}/pki",
            "--hostname-override", node, "--node-ip", _address_of(node),
            "--node-labels", f"topology.kubernetes.io/zone=zone-{node}",
            mounts_of=node,
        )  # fmt: skip

    def _offer_volumes(self, names: Sequence[str]) -> None:
        storage_class = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": "local",
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        for name in names:
            directory = STATE / "volumes" / name
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        self.apply(storage_class, *(_volume(name, name.partition("-")[0]) for name in names))

    # The end

    def _remove(self) -> None:
        """Remove everything that carries the cluster's name."""
        end_s = time.monotonic() + 60
        while left := _processes():
            _end(left, signal.SIGKILL)
            if time.monotonic() > end_s:
                raise StepFailed(f"these processes of the cluster do not end: {', '.join(map(str, left))}")
        if (Path("/sys/class/net") / _HOST_INTERFACE).exists():
            _ip("link", "delete", _HOST_INTERFACE)
        for namespace in Path("/run/netns").glob(f"{NAME}-*"):
            _ip("netns", "delete", namespace.name)
        for root in _cgroups_of_nodes():
            for directory, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):  # the kernel may still be busy with the last process
                    os.rmdir(directory)
        if STATE.exists():
            shutil.rmtree(STATE)


# Processes and commands


def _run(
    *command: str,
    stdin: str | None = None,
    check: bool = True,
    env: dict[str, str] | None = None,
    timeout_s: float = 900,
) -> str:
    done = subprocess.run(
        command,
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env or {**os.environ, "PATH": _path()},
        check=False,
    )
    if check and done.returncode:
        raise StepFailed(f"{' '.join(command)[:200]}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _check(holds: bool) -> None:
    if not holds:
        raise StepFailed("not yet")


def _namespace_of(pid: int | None) -> str | None:
    with contextlib.suppress(OSError):
        return None if pid is None else os.readlink(f"/proc/{pid}/ns/mnt")
    return None


def _mark_of(pid: str) -> str | None:
    """Return the part that a process belongs to; None if it is not of the cluster."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{_MARK}=".encode()):
                return entry.partition(b"=")[2].decode()
    return None


def _pid_of(part: str) -> int | None:
    """Return the process that was started as this part, if it runs."""
    with contextlib.suppress(OSError, ValueError):
        pid = (STATE / f"{part}.pid").read_text()
        return int(pid) if _mark_of(pid) == part else None
    return None


def _has_ended(part: str) -> bool:
    """Whether the part was started and is gone; its environment cannot be read while it executes another program."""
    file = STATE / f"{part}.pid"
    return file.exists() and _is_zombie(int(file.read_text()))


def _processes() -> list[int]:
    """Return all processes of the cluster, those in containers included."""
    marked = {int(each) for each in os.listdir("/proc") if each.isdigit() and _mark_of(each) is not None}
    for root in _cgroups_of_nodes():
        for file in root.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                marked |= {int(line) for line in file.read_text().split() if int(line)}
    return sorted(pid for pid in marked if not _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _end(pids: Sequence[int | None], how: signal.Signals) -> None:
    """Signal processes, and wait for some seconds until they have ended."""
    there = [pid for pid in pids if pid is not None]
    for pid in there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
    end_s = time.monotonic() + 10
    while any(not _is_zombie(pid) for pid in there) and time.monotonic() < end_s:
        for pid in there:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    build.CACHE.mkdir(parents=True, exist_ok=True)
    with (build.CACHE / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Network


def _number(node: str) -> int:
    return NODES.index(node) + 1


def _address_of(node: str) -> str:
    return f"{_NET}.0.{10 + _number(node)}"


def _pods_of(node: str) -> str:
    return f"{_NET}.{128 + _number(node)}.0/24"


def _make_network() -> None:
    taken = [line for line in _run("ip", "-o", "route").splitlines() if line.startswith(f"{_NET}.")]
    if taken:
        raise NotHere(f"the addresses {_NET}.0.0/16 are in use on this machine: {taken[0].strip()}")
    if shutil.which("modprobe", path=_path()):
        _run("modprobe", "br_netfilter", check=False)  # a kernel that has it built in has no such module
    control = f"{NAME}-cp"
    _ip("netns", "add", control)
    _ip("-n", control, "link", "set", "lo", "up")
    _ip("-n", control, "link", "add", "br0", "type", "bridge")
    _ip("-n", control, "address", "add", f"{_MASTER}/24", "dev", "br0")
    _ip("-n", control, "link", "set", "br0", "up")
    _ip("-n", control, "link", "add", "p-host", "type", "veth", "peer", "name", _HOST_INTERFACE)
    _ip("-n", control, "link", "set", _HOST_INTERFACE, "netns", str(os.getpid()))
    _ip("address", "add", f"{_HOST}/24", "dev", _HOST_INTERFACE)
    _ip("link", "set", _HOST_INTERFACE, "up")
    _forward(control)
    for node in NODES:
        namespace = f"{NAME}-{node}"
        _ip("netns", "add", namespace)
        _ip("-n", control, "link", "add", f"p-{node}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", namespace, "address", "add", f"{_address_of(node)}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", interface, "up")
        _ip("-n", namespace, "route", "add", "default", "via", _MASTER)
        _forward(namespace)
    for port in ("host", *NODES):
        _ip("-n", control, "link", "set", f"p-{port}", "master", "br0", "up")
    for node in NODES:
        for place in ([], ["-n", control], *(["-n", f"{NAME}-{other}"] for other in NODES if other != node)):
            _ip(*place, "route", "add", _pods_of(node), "via", _address_of(node))
    for place in ([], ["-n", control]):  # the first node translates the addresses of services for those outside
        _ip(*place, "route", "add", _SERVICES, "via", _address_of(NODES[0]))


def _restore_rules(node: str, rules: str) -> None:
    _run(
        "nsenter",
        f"--net=/run/netns/{NAME}-{node}",
        "iptables-restore",
        "--noflush",
        stdin=f"*mangle\n{rules}\nCOMMIT\n",
    )


def _forward(namespace: str) -> None:
    command = "echo 1 > /proc/sys/net/ipv4/ip_forward"
    _run("nsenter", f"--net=/run/netns/{namespace}", "sh", "-c", command)


# Certificates


def _make_certificates() -> None:
    pki = STATE / "pki"
    pki.chmod(0o700)
    ca_key, ca_name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string(f"CN={NAME}")
    ca = _certificate(ca_name, ca_key, ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=None))
    _store(pki / "ca", ca, ca_key)
    (pki / "accounts.key").write_bytes(_pem(ec.generate_private_key(ec.SECP256R1())))
    names: list[x509.GeneralName] = [
        x509.IPAddress(ipaddress.ip_address(each)) for each in (_MASTER, f"{_NET}.64.1", "127.0.0.1")
    ]
    kubernetes = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
    names += [x509.DNSName(each) for each in kubernetes]
    subjects = {
        "apiserver": "CN=kube-apiserver",
        "to-kubelets": "CN=to-kubelets,O=system:masters",
        "admin": "CN=admin,O=system:masters",
        "controllers": "CN=system:kube-controller-manager",
        "scheduler": "CN=system:kube-scheduler",
        "proxy": "CN=system:kube-proxy",
        **{node: f"CN=system:node:{node},O=system:nodes" for node in NODES},
    }
    for name, subject in subjects.items():
        key = ec.generate_private_key(ec.SECP256R1())
        extension = x509.SubjectAlternativeName(names) if name == "apiserver" else None
        made = _certificate(x509.Name.from_rfc4514_string(subject), key, ca_name, ca_key, extension)
        _store(pki / name, made, key)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": NAME,
            "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": name}}],
            "clusters": [
                {
                    "name": NAME,
                    "cluster": {"server": f"https://{_MASTER}:6443", "certificate-authority": f"{pki}/ca.crt"},
                }
            ],
            "users": [
                {"name": name, "user": {"client-certificate": f"{pki}/{name}.crt", "client-key": f"{pki}/{name}.key"}}
            ],
        }
        (pki / f"{name}.conf").write_text(json.dumps(config))


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType | None,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365))
    )
    if extension is not None:
        made = made.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    if not isinstance(extension, x509.BasicConstraints):
        uses = [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
        made = made.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return made.sign(issuer_key, hashes.SHA256())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _store(path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    path.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    path.with_suffix(".key").write_bytes(_pem(key))


# Nodes


def _volume(name: str, node: str) -> dict[str, Any]:
    """Return a volume that is a directory of a node."""
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "200Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "local",
            "local": {"path": str(STATE / "volumes" / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}},
        },
    }


def _make_image(program: Path, archive: Path, tag: str) -> None:
    """Write an image that has a program without libraries and nothing else, in the form of `docker save`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        data = program.read_bytes()
        entry = tarfile.TarInfo("program")
        entry.size, entry.mode = len(data), 0o755
        tar.addfile(entry, io.BytesIO(data))
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Entrypoint": ["/program"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for name, content in (
            ("manifest.json", json.dumps(manifest).encode()),
            ("config.json", json.dumps(config).encode()),
            ("layer.tar", layer.getvalue()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _hierarchies() -> list[Path]:
    """Return the roots of the mounted cgroup hierarchies: one of version 2, or one for each controller."""
    return [each for each in (_CGROUPS, *sorted(_CGROUPS.iterdir())) if (each / "cgroup.procs").exists()]


def _is_version_2() -> bool:
    return (_CGROUPS / "cgroup.controllers").exists()


def _make_cgroups(node: str) -> None:
    roots = [_CGROUPS] if _is_version_2() else _hierarchies()
    for root in roots:
        own = root / f"{NAME}-{node}"
        own.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # version 1 inherits neither
            if (root / name).exists() and not _is_version_2():
                (own / name).write_text((root / name).read_text())
        if _is_version_2():
            wanted = " ".join(f"+{each}" for each in (root / "cgroup.controllers").read_text().split())
            for place in (root, own):
                with contextlib.suppress(OSError):  # a controller that is in use elsewhere
                    (place / "cgroup.subtree_control").write_text(wanted)
        for name, normal in (("cpu.shares", 1024), ("cpu.weight", 100)):
            if (own / name).exists():
                (own / name).write_text(str(normal * _SHARES_OF_NODE))


def _cgroups_of_nodes() -> list[Path]:
    roots = [_CGROUPS] if _is_version_2() else [each for each in _CGROUPS.iterdir() if each.is_dir()]
    return [each for root in roots for each in root.glob(f"{NAME}-n*") if each.is_dir()]


def _is_ours(volume: str) -> bool:
    return volume.partition("-")[0] in NODES
