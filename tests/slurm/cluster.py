"""A Slurm of two nodes on one machine: munged, slurmctld and two slurmd, in a temporary folder.

    namespace of processes ─┬─ munged
                            ├─ slurmctld                       sbatch, scontrol: from outside
                            ├─ slurmd  host n1, own /dev/shm ── ranks
                            └─ slurmd  host n2, own /dev/shm ── ranks

All of it lives in one namespace of processes: when that is ended, or the process that made it ends,
the kernel kills whatever is in there.  Each node says that it has 8 cores, bound to nothing, and
two GPUs, which are null devices: Slurm gives them to ranks as it would give real ones.

It takes root, Debian's slurmctld, slurmd, slurm-client and munge, `unshare` and `setpriv`
(util-linux), and MPICH.

    with slurm() as cluster:
        job = cluster.submit("train_cpu", "--dim", 16, flags=["--nodes=2"])
        assert cluster.wait(job)["JobState"] == "COMPLETED"
"""

import contextlib
import functools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.launch import QUIET, ROOT, clean_environment, mpiexec, run

NODES = ("n1", "n2")
CORES = 8
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare", "setpriv")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE")

CONFIGURATION = """
ClusterName=mpipar
SlurmctldHost=control(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
MailProg=/bin/true
MpiDefault=none
GresTypes=gpu
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
ReturnToService=2
KillWait=5
MinJobAge=600
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} Gres=gpu:2
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} Gres=gpu:2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP OverTimeLimit=0
"""

GPUS = "NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero\n"

HOSTS = "127.0.0.1 localhost control n1 n2\n"

# the first process of the namespace; {folder} has everything
FIRST = """
set -eu
mount --bind "$1/hosts" /etc/hosts
hostname control
munged --foreground --key-file="$1/munge/key" --socket="$1/munge/socket" \\
  --pid-file="$1/munge/pid" --log-file="$1/munge/log" --seed-file="$1/munge/seed" &
while [ ! -S "$1/munge/socket" ]; do kill -0 $!; sleep 0.05; done
slurmctld -D -f "$1/slurm.conf" &
for node in n1 n2; do
  unshare --uts --ipc --mount sh -c '
    hostname "$2" && mount -t tmpfs none /dev/shm && exec slurmd -D -f "$1/slurm.conf"
  ' sh "$1" "$node" &
done
wait
"""

# what the scripts call as VENV/bin/mpipar: notes where it runs; with SLOW, the steps of a job's
# first run take so many seconds more each
MPIPAR = """#!{python}
import os, platform, sys, time
number = os.environ.get("PMI_RANK", os.environ.get("SLURM_PROCID"))
line = f"{{platform.node()}} {{number}} {{os.environ.get('CUDA_VISIBLE_DEVICES', '')}}\\n"
with open("{folder}/ranks-" + os.environ["SLURM_JOB_ID"], "a") as file:
    file.write(line)
if "SLOW" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    import mpipar
    step = mpipar.optim.AdamW.step
    def slowly(*args, **options):
        time.sleep(float(os.environ["SLOW"]))
        step(*args, **options)
    mpipar.optim.AdamW.step = slowly
from mpipar.cli.main import main
sys.exit(main())
"""

# Slurm 22.05 cuts messages of the PMI at 1024 characters, and the addresses of UCX may take more
ENVIRONMENT = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}


class Rank(NamedTuple):
    """Where a rank of a job ran."""

    node: str
    number: int
    gpus: str  # CUDA_VISIBLE_DEVICES


class Cluster(NamedTuple):
    """A running Slurm; jobs run in `folder`."""

    folder: Path

    def call(self, *command: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a client of Slurm and return what it says; RuntimeError if it fails."""
        full = {**ENVIRONMENT, "SLURM_CONF": str(self.folder / "slurm.conf")}
        full |= {"VENV": str(self.folder / "venv"), **(env or {})}
        done = run(list(command), 30.0, cwd=self.folder, env=full)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(map(str, command))}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(
        self,
        script: str,
        *args: str | int,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a script of slurm/, with flags of sbatch and arguments; return its number."""
        path = ROOT / "slurm" / f"{script}.sbatch"
        said = self.call("sbatch", "--parsable", *flags, path, *map(str, args), env=env)
        return said.strip().partition(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job, or of one task of an array (`12_1`)."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", "-o", job)))

    def wait(self, job: str, limit: float = 120.0) -> dict[str, str]:
        """Wait until a job has ended; return what Slurm knows of it."""
        end = time.monotonic() + limit
        while (facts := self.show(job))["JobState"] not in ENDED:
            if time.monotonic() > end:
                raise TimeoutError(f"job {job} has not ended: {facts}\n{self.output(job)}")
            time.sleep(0.2)
        return facts

    def output(self, job: str) -> str:
        """Return what a job has printed."""
        path = Path(self.show(job)["StdOut"])
        return path.read_text() if path.exists() else ""

    def ranks(self, job: str) -> list[Rank]:
        """Return where each rank of a job was, of all its runs, by number."""
        lines = (self.folder / f"ranks-{job}").read_text().splitlines()
        found = [line.split(" ") for line in lines]
        ranks = [Rank(node, int(number), gpus) for node, number, gpus in found]
        return sorted(ranks, key=lambda rank: rank.number)


@contextlib.contextmanager
def slurm() -> Iterator[Cluster]:
    """Start a Slurm of two idle nodes; end it with everything that runs on it."""
    with tempfile.TemporaryDirectory(prefix="mpipar-slurm-") as name:
        folder = Path(name)
        _write(folder)
        first = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child"]
        first += ["--mount-proc", "--mount", "--uts", "sh", "-c", FIRST, "sh", str(folder)]
        with open(folder / "daemons.out", "w") as said:
            process = subprocess.Popen(
                first,
                cwd=folder,
                env={**clean_environment(), **QUIET},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            cluster = Cluster(folder)
            _wait_until_idle(cluster, process)
            yield cluster
        finally:
            process.kill()
            process.wait()


@functools.cache
def why_not() -> str:
    """Return why there can be no Slurm here, or "" if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "a Slurm of one's own takes root"
    if len(mpiexec()) > 1:
        return "srun --mpi=pmi2 does not start Open MPI"
    spaces = ["unshare", "--pid", "--fork", "--mount-proc", "--mount", "--uts", "--ipc", "true"]
    done = subprocess.run(spaces, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def _write(folder: Path) -> None:
    """Write what the daemons and the scripts read."""
    folder.chmod(0o755)
    for part in ("munge", "state", "spool-n1", "spool-n2", "venv/bin"):
        (folder / part).mkdir(mode=0o755, parents=True)
    key = folder / "munge/key"
    key.touch(0o400)
    key.write_bytes(os.urandom(128))
    text = CONFIGURATION.format(folder=folder, ports=_free_ports(3), cores=CORES)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(GPUS)
    (folder / "hosts").write_text(HOSTS)
    programs = {
        "mpipar": MPIPAR.format(python=sys.executable, folder=folder),
        "mpiexec": f'#!/bin/sh\nexec {mpiexec()[0]} "$@"\n',
    }
    for name, text in programs.items():
        path = folder / "venv/bin" / name
        path.write_text(text)
        path.chmod(0o755)


def _free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_idle(cluster: Cluster, process: subprocess.Popen[bytes], limit: float = 30) -> None:
    """Wait until both nodes are there; RuntimeError, with what the daemons said, if they do not."""
    end = time.monotonic() + limit
    said = ""
    while said.split() != ["2", "idle"]:
        if process.poll() is not None or time.monotonic() > end:
            daemons = (cluster.folder / "daemons.out").read_text()
            raise RuntimeError(f"Slurm does not start: {said}\n{daemons}")
        with contextlib.suppress(RuntimeError):
            said = cluster.call("sinfo", "--noheader", "--format=%D %t")
        time.sleep(0.1)
