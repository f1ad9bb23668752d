"""A real Slurm on loopback, of Debian's packages: a controller and two nodes, all on this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "setpriv")
_MISSING = [name for name in _PROGRAMS if shutil.which(name) is None]
UNUSABLE = f"{', '.join(_MISSING)} missing; scripts/test-services" if _MISSING else ""
UNUSABLE = UNUSABLE or ("" if os.geteuid() == 0 else "only root may start it")
needs_slurm = pytest.mark.skipif(bool(UNUSABLE), reason=f"NOTHING IS TRIED ON SLURM: {UNUSABLE}")
CGROUPS = Path("/sys/fs/cgroup")
_START_SECS, _END_SECS = 60, 60


class Slurm:
    """A cluster with the default partition `main`; `env` is what its commands need."""

    def __init__(self, home: Path) -> None:
        self.home = home
        mark = secrets.token_hex(3)
        self.nodes = [f"r{mark}a", f"r{mark}b"]  # two clusters of one machine share the cgroups
        self.env = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Returns when both nodes are idle."""
        for name in ("ctl", "log", "run", "munge"):
            (self.home / name).mkdir()
        for name in ("log", "run", "munge"):
            shutil.chown(self.home / name, "munge", "munge")
        (self.home / "munge").chmod(0o700)
        self._write_configuration()
        self._start_munge()
        self._daemon("slurmctld", "-D")
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-N", node)
        end = time.monotonic() + _START_SECS
        while self.ask("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) != "2":
            assert time.monotonic() < end, f"Slurm does not start: {self._logs()}"
            time.sleep(0.05)

    def ask(self, *words: str, check: bool = True) -> str:
        """What a command of Slurm prints; raises AssertionError where it fails."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` knows: JobState, Restarts, ExitCode, ..."""
        words = self.ask("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, states: Sequence[str], secs: float = 100) -> dict[str, str]:
        """Wait until the job is in one of the states, and say what is known of it then."""
        end = time.monotonic() + secs
        while (found := self.state(job))["JobState"] not in states:
            assert time.monotonic() < end, f"{found} is not {states} within {secs} s: {self._logs()}"
            time.sleep(0.1)
        return found

    def wait_for_file(self, job: str, path: Path, secs: float = 100) -> None:
        """Wait until the job has made a file; raises AssertionError when it ends without one."""
        end = time.monotonic() + secs
        while not path.exists():
            found = self.state(job)
            assert found["JobState"] in ("PENDING", "CONFIGURING", "RUNNING") or path.exists(), found
            assert time.monotonic() < end, f"no {path} within {secs} s: {found}"
            time.sleep(0.1)

    def wait_for_requeue(self, job: str, secs: float = 100) -> None:
        """Wait until it is queued again. Slurm holds it back for some 15 s, and needs them to clean up."""
        end = time.monotonic() + secs
        while (found := self.state(job))["Restarts"] == "0":
            assert found["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), found
            assert time.monotonic() < end, f"{found} is not queued again within {secs} s"
            time.sleep(0.1)

    def wait_until_gone(self, job: str, secs: float = 100) -> None:
        """Wait until nothing of the job is left on the nodes."""
        end = time.monotonic() + secs
        while left := self.ask("squeue", "-h", "-j", job, "-o", "%T", check=False):
            assert time.monotonic() < end, f"job {job} is {left} after {secs} s: {self._logs()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End all jobs, then the daemons, the newest first, then what is left in the cgroups of the nodes."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.ask("scancel", "--user=root", check=False)
            end = time.monotonic() + _END_SECS
            while self.ask("squeue", "-h", check=False) and time.monotonic() < end:
                time.sleep(0.1)
        for one in reversed(self._daemons):
            one.terminate()
            with suppress(subprocess.TimeoutExpired):
                one.wait(10)
            one.kill()
            one.wait()
        for node in self.nodes:
            _clear(node)

    def _daemon(self, *words: str) -> None:
        """It dies with this process, whatever ends that."""
        with (self.home / "log" / f"daemon.{len(self._daemons)}").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig=TERM", *words],
                    env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip

    def _start_munge(self) -> None:
        key = self.home / "munge/key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        shutil.chown(key, "munge", "munge")
        run, log = self.home / "run", self.home / "log"
        self._daemon(
            *("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "--pdeathsig=TERM"),
            *("munged", "-F", f"--key-file={key}", f"--socket={run}/munge.sock", f"--seed-file={run}/seed"),
            *(f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log"),
        )
        end = time.monotonic() + _START_SECS
        while not (run / "munge.sock").exists():
            assert time.monotonic() < end, "munged does not start"
            time.sleep(0.02)

    def _write_configuration(self) -> None:
        home, host = self.home, socket.gethostname()
        cgroups = _cgroups_work()
        ports = _free_ports(3)
        lines = [
            "ClusterName=tests",
            # Jobs meet at ports that follow from their numbers: those of two clusters on one machine differ.
            f"FirstJobId={1 + secrets.randbelow(1_000_000)}",
            f"SlurmctldHost={host}(127.0.0.1)",
            *("SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "CredType=cred/munge"),
            f"AuthInfo=socket={home}/run/munge.sock,cred_expire=5",
            f"SlurmctldPort={ports[0]}",
            f"SlurmctldPidFile={home}/run/ctl.pid",
            f"SlurmdPidFile={home}/run/%n.pid",
            f"StateSaveLocation={home}/ctl",
            f"SlurmdSpoolDir={home}/%n",
            f"ProctrackType=proctrack/{'cgroup' if cgroups else 'linuxproc'}",
            f"TaskPlugin=task/{'cgroup' if cgroups else 'none'}",
            *("JobAcctGatherType=jobacct_gather/none", "AccountingStorageType=accounting_storage/none"),
            *("JobCompType=jobcomp/none", "MpiDefault=none", "SwitchType=switch/none"),
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_Core_Memory", "MailProg=/bin/true"),
            *("SchedulerParameters=sched_interval=2,bf_interval=2", "ReturnToService=2", "KillWait=15"),
            *("SlurmdTimeout=30", "SlurmdParameters=config_overrides"),
        ]
        for node, port in zip(self.nodes, ports[1:], strict=True):
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            lines.append(f"NodeName={node} {place} CPUs=4 RealMemory=8000")
        lines.append(f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP")
        (home / "slurm.conf").write_text("\n".join(lines) + "\n")
        if cgroups:
            (home / "cgroup.conf").write_text(
                f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={CGROUPS}\nCgroupAutomount=no\n"
                "ConstrainRAMSpace=no\nConstrainCores=no\nConstrainDevices=no\n"
            )

    def _logs(self) -> str:
        texts = (path.read_text(errors="replace")[-2000:] for path in sorted((self.home / "log").iterdir()))
        return "\n".join(texts)


def _cgroups_work() -> bool:
    """Whether cgroup v1 is here and may be written: else the ranks of a killed agent have only themselves."""
    tried = CGROUPS / "freezer" / f"relay-{secrets.token_hex(4)}"
    try:
        tried.mkdir()
        tried.rmdir()
    except OSError:
        return False
    return (CGROUPS / "memory").is_dir() and (CGROUPS / "cpuset").is_dir()


def _clear(node: str) -> None:
    """End what Slurm has left behind on a node, and remove the node's cgroups."""
    for folder in sorted(CGROUPS.glob(f"*/slurm*{node}*"), key=str):
        below = sorted([folder, *folder.rglob("*/")], key=lambda one: -len(one.parts))
        for one in below:
            with suppress(OSError):
                for pid in (one / "cgroup.procs").read_text().split():
                    os.kill(int(pid), 9)
        end = time.monotonic() + 10
        while any(one.exists() for one in below) and time.monotonic() < end:
            for one in below:
                with suppress(OSError):
                    one.rmdir()
            time.sleep(0.02)


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, below those where jobs meet and those that the system gives to connections."""
    found: list[int] = []
    while len(found) < count:
        port = 10_000 + secrets.randbelow(10_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found += [] if port in found else [port]
    return found


@contextmanager
def slurm() -> Iterator[Slurm]:
    """A cluster that is gone, with its jobs and files, after the block."""
    with tempfile.TemporaryDirectory(prefix="relay-slurm-", ignore_cleanup_errors=True) as home:
        Path(home).chmod(0o755)  # munge's user goes through it
        cluster = Slurm(Path(home))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
