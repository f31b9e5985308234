"""Requirements of the machine, checked before anything starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.debian import install_commands
from tools.errors import Missing

COMMANDS = {"ip": "iproute2", "openssl": "openssl", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}


def check() -> None:
    """Raises Missing if the machine cannot run a cluster. Installs missing commands from Debian."""
    if sys.platform != "linux":
        raise Missing("Linux (nodes are namespaces)")
    if os.geteuid() != 0:
        raise Missing("root (nodes are namespaces and mounts)")
    install_commands(COMMANDS)
    attempt = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True
    )
    if attempt.returncode != 0:
        raise Missing(f"network, mount and PID namespaces (is this a container without privileges? {attempt.stderr.strip()})")
    if "overlay" not in Path("/proc/filesystems").read_text() and not _loads("overlay"):
        raise Missing("a kernel with overlayfs (CONFIG_OVERLAY_FS)")
    if not Path("/proc/sys/net/bridge").exists() and not _loads("br_netfilter"):
        raise Missing("a kernel with bridge netfilter (CONFIG_BRIDGE_NETFILTER, module br_netfilter)")
    if not any(line.split()[2] in ("cgroup", "cgroup2") for line in Path("/proc/self/mounts").read_text().splitlines()):
        raise Missing("cgroups (mount them at /sys/fs/cgroup)")


def _loads(module: str) -> bool:
    modprobe = shutil.which("modprobe")
    return modprobe is not None and subprocess.run([modprobe, module], capture_output=True).returncode == 0
