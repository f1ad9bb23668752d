"""A server under good clients and malformed requests, and while epochs are committed; all in processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from http_client import Client, Reply
from serve_load import Seen, good_clients

PROGRAM = """\
import sys, time, torch, torchrelay
from torchrelay import Job, JobRunner, max_epochs


def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


if __name__ == "__main__":
    torchrelay.seed(0)
    model = make()
    job = Job("storm", blobs=dict(model=model))

    @job.epoch
    def train(ctx):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        time.sleep(float(sys.argv[2]))

    job.stop_when(max_epochs(int(sys.argv[1])))
    JobRunner(job, "run", keep_last=5).main()
"""
CLASSES = 10
PAUSE_SECS = 0.05
CROWD_PER_SEC = 200
"""Requests of all good clients together: what leaves room for others on one core."""


class Target:
    """A trained run in a directory, and the server of it."""

    def __init__(self, directory: Path, watch: bool) -> None:
        self.directory = directory
        (directory / "storm_target.py").write_text(PROGRAM)
        self.train(1).wait(120)
        command = [
            sys.executable,
            "-m",
            "torchrelay",
            "serve",
            "run",
            "--model",
            "storm_target:make",
            "--port",
            "0",
        ]
        self.log = directory / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *(["--watch"] if watch else [])],
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.port = self._port()

    def train(self, epochs: int, pause_secs: float = 0.0) -> subprocess.Popen[bytes]:
        """Train on, in a process of its own."""
        command = [sys.executable, "storm_target.py", str(epochs), str(pause_secs)]
        return subprocess.Popen(
            command, cwd=self.directory, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    def _port(self) -> int:
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(r"serving .* at http://127\.0\.0\.1:(\d+)/", self.log.read_text()):
                return int(found[1])
            time.sleep(0.1)
        raise SystemExit(f"the server did not begin:\n{self.log.read_text()}")

    def memory_mib(self, what: str) -> float:
        """VmRSS, or VmHWM: the most there ever was."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(what)) / 1024

    def leave(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


def right(sample: list[float], reply: Reply) -> str:
    """Whether an answer has the form of one."""
    told = reply.json()["result"]
    fine = isinstance(told, list) and len(told) == CLASSES and all(isinstance(one, float) for one in told)
    return "" if fine else f"a good request got {told!r:.100}"


def storm(target: Target, chosen: argparse.Namespace) -> list[str]:
    """Quiet, then the storm with the same good clients; returns findings."""
    findings: list[str] = []

    def phase(title: str, clients: int, numbers: range, pause: float) -> Seen:
        attackers = attack(target.port, numbers, chosen) if numbers else None
        until = time.monotonic() + (0.0 if attackers else chosen.quiet_secs)

        def going() -> bool:
            return time.monotonic() < until if attackers is None else attackers.poll() is None

        good = asyncio.run(good_clients(target.port, clients, going, right, chosen.seed, pause))
        bad = ended(attackers)
        findings.extend([*good.findings, *bad.findings])
        tell(title, good, bad)
        return good

    few, many = chosen.paced, chosen.clients
    warm = time.monotonic() + 5
    asyncio.run(good_clients(target.port, many, lambda: time.monotonic() < warm, right, 1))
    before = target.memory_mib("VmRSS")
    half, none, crowd_pause = chosen.malformed // 2, range(0), many / CROWD_PER_SEC
    phase(f"{many} clients without a pause", many, none, 0.0)
    rest = [
        phase(f"{few} clients, quiet", few, none, PAUSE_SECS),
        phase(f"{few} clients, malformed", few, range(half), PAUSE_SECS),
        phase(f"{many} clients, quiet", many, none, crowd_pause),
        phase(f"{many} clients, malformed", many, range(half, chosen.malformed), crowd_pause),
    ]
    for quiet, stormy, count in ((rest[0], rest[1], few), (rest[2], rest[3], many)):
        ratio = stormy.quantile(0.99) / max(quiet.quantile(0.99), 1e-9)
        usual = stormy.usual_quantile(0.99) / max(quiet.usual_quantile(0.99), 1e-9)
        print(
            f"p99 of {count} clients: {ratio:.2f} times the quiet value; of 100 answers, usually, {usual:.2f}"
        )
    now, most = target.memory_mib("VmRSS"), target.memory_mib("VmHWM")
    print(
        f"memory: {before:.0f} MiB warm, {now:.0f} MiB behind it, {most:.0f} at most ({most - before:+.0f})"
    )
    return findings


def watch(target: Target, chosen: argparse.Namespace) -> list[str]:
    """Good clients while a training commits epochs; returns findings."""
    training = target.train(1 + chosen.epochs, 1.5)

    begun = time.monotonic()

    def going() -> bool:
        """A while longer than the training, so that its last epoch is seen, too."""
        nonlocal begun
        if training.poll() is None:
            begun = time.monotonic()
        return time.monotonic() < begun + 3

    good = asyncio.run(good_clients(target.port, 50, going, right, chosen.seed))
    tell(f"50 clients, {chosen.epochs} epochs committed", good, Seen())
    failed = sum(count for status, count in good.statuses.items() if status != 200)
    print(f"epochs that answered: {sorted(good.epochs)}; failed requests: {failed}")
    wrong = [] if failed == 0 and len(good.epochs) > 2 else [f"{failed} failed, epochs {sorted(good.epochs)}"]
    return [*good.findings, *wrong]


def attack(port: int, numbers: range, chosen: argparse.Namespace) -> subprocess.Popen[str]:
    """Send malformed requests from a process of its own."""
    words = (port, numbers.start, numbers.stop, chosen.attackers, chosen.seed)
    command = [sys.executable, str(Path(__file__).with_name("serve_load.py")), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(attackers: subprocess.Popen[str] | None) -> Seen:
    """What an attack saw; nothing where there was none."""
    if attackers is None:
        return Seen()
    told = json.loads(attackers.communicate()[0])
    return Seen(
        Counter({int(name): count for name, count in told["statuses"].items()}), findings=told["findings"]
    )


def tell(title: str, good: Seen, bad: Seen) -> None:
    """A line of figures."""
    print(
        f"{title}: {len(good.secs)} good {dict(good.statuses)}, p50 {good.quantile(0.5) * 1000:.1f} ms, "
        f"p99 {good.quantile(0.99) * 1000:.1f} ms; malformed {dict(sorted(bad.statuses.items()))}",
        flush=True,
    )


def still_right(target: Target) -> list[str]:
    """Whether it answers as ever behind all that."""

    async def ask() -> list[str]:
        client = Client(target.port)
        health = await client.ask("GET", "/health")
        answer = await client.predict([0.5] * 64)
        client.close()
        return [f"{one.status} {one.body!r:.200}" for one in (health, answer) if one.status != 200]

    return asyncio.run(ask())


def main() -> int:
    """Exit code 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/serve-storm", description=__doc__)
    parser.add_argument("--malformed", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--paced", type=int, default=8, help="clients that ask now and then")
    parser.add_argument("--attackers", type=int, default=4, help="connections that send what is malformed")
    parser.add_argument("--quiet-secs", type=float, default=20.0)
    parser.add_argument("--epochs", type=int, default=6, help="committed under load; 0 leaves that part out")
    parser.add_argument("--seed", type=int, default=20261122)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    findings: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        target = Target(Path(scratch), watch=chosen.epochs > 0)
        try:
            if chosen.malformed:
                findings += storm(target, chosen)
            if chosen.epochs:
                findings += watch(target, chosen)
            findings += still_right(target)
        finally:
            code = target.leave()
        print(f"SIGTERM: left with {code}")
        findings += [] if code == 0 else [f"left with {code}: {target.log.read_text()[-2000:]}"]
    print(json.dumps({"findings": findings[:20], "count": len(findings)}, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
