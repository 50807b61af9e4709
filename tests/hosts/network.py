"""Two emulated hosts on one machine, with a link of 1 Gbit/s between them.

    host-a   ranks 0 1 2 3 ── eth0 ══ 1 Gbit/s each way ══ eth0 ── ranks 4 5 6 7   host-b

A host is a network namespace with a host name, an IPC namespace and a /dev/shm of its own, entered
by a script that mpiexec takes for ssh.  Within a host ranks share memory; between the two, all that
travels goes through the virtual Ethernet pair, which `tc tbf` slows down and whose counters say how
much it was (/sys/class/net/eth0/statistics).

It takes root, `ip` and `tc` (Debian: iproute2), and MPICH.

    with two_hosts() as hosts:
        done = hosts.launch(8, ["program.py"])
"""

import contextlib
import functools
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.launch import mpiexec, run

NAMES = ("host-a", "host-b")
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # of the network that is reserved for examples
RATE = 125_000_000  # bytes a second, each way
COUNTERS = "/sys/class/net/eth0/statistics"  # as a process on a host sees its end of the link

# mpiexec says: SCRIPT [options] NAME 'command' arguments...
ENTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec ip netns exec "mpipar-%d-$1" unshare --uts --ipc --mount sh -c '
    hostname "$1" && mount -t tmpfs none /dev/shm && shift && eval "exec $*"' sh "$@"
"""

# MPICH goes through UCX or OFI, and neither may find another way than the link
ENVIRONMENT = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "eth0",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
}


class Hosts(NamedTuple):
    """The two hosts; `script` runs a command on one of them."""

    script: Path

    def launch(
        self, n: int, args: Sequence[str | Path], timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGS` on `n` ranks, the first half on the first host."""
        half = n // 2
        job = [
            *mpiexec(), "-launcher", "ssh", "-launcher-exec", self.script,
            "-localhost", ADDRESSES[0], "-hosts", ",".join(f"{name}:{half}" for name in NAMES),
            "-n", n, sys.executable, *args,
        ]  # fmt: skip
        return self.shell(shlex.join(map(str, job)), timeout)

    def shell(self, command: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a line of shell on the first host, which then has an empty /dev/shm."""
        job: list[str | Path] = [self.script, NAMES[0], f"sh -c {shlex.quote(command)}"]
        return run(job, timeout, env=dict(ENVIRONMENT))


@contextlib.contextmanager
def two_hosts(rate: int = RATE) -> Iterator[Hosts]:
    """Build two hosts with a link of `rate` bytes a second each way; take them down at the end."""
    spaces = [f"mpipar-{os.getpid()}-{name}" for name in NAMES]
    _sweep()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for space in spaces:
            call("ip", "netns", "add", space)
            stack.callback(call, "ip", "netns", "delete", space)
        first, second = spaces
        ends = ("eth0", "netns", first, "type", "veth", "peer", "eth0", "netns", second)
        call("ip", "link", "add", *ends)
        for space, address in zip(spaces, ADDRESSES, strict=True):
            call("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            call("ip", "-n", space, "link", "set", "eth0", "addrgenmode", "none")  # no IPv6
            for device in ("lo", "eth0"):
                call("ip", "-n", space, "link", "set", device, "up")
            shape = ("tbf", "rate", f"{8 * rate}bit", "burst", "256kb", "latency", "50ms")
            call("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *shape)
        for space in spaces:
            _wait_until_up(space)
        script = Path(folder) / "enter"
        script.write_text(ENTER % os.getpid())
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        yield Hosts(script)


@functools.cache
def why_not() -> str:
    """Return why there can be no emulated hosts here, or "" if there can."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    if os.geteuid() != 0:
        return "network namespaces take root"
    if len(mpiexec()) > 1:
        return "the launcher is not MPICH's"
    try:
        with two_hosts() as hosts:
            call(str(hosts.script), NAMES[1], "true")
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(error.cmd)}: {error.stderr.strip()}"
    except TimeoutError as error:
        return str(error)
    return ""


def call(*command: str) -> str:
    """Run a command and return what it says; CalledProcessError if it fails."""
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return done.stdout


def _sweep() -> None:
    """Remove the hosts of processes that were killed before they could."""
    for line in call("ip", "netns", "list").splitlines():
        name, *_ = line.split()
        if name.startswith("mpipar-") and not Path("/proc", name.split("-")[1]).exists():
            call("ip", "netns", "delete", name)


def _wait_until_up(space: str, limit: float = 10.0) -> None:
    """Wait until the kernel has noticed that the link is there: it is not used before."""
    end = time.monotonic() + limit
    while "state UP" not in call("ip", "-n", space, "link", "show", "eth0"):
        if time.monotonic() > end:
            raise TimeoutError(f"the link of {space} does not come up")
        time.sleep(0.02)
