"""`launch --torchx`: submit a launch with TorchX's command line.

Local schedulers run it on this machine and wait; the exit code then follows the ranks and `status.json`.
Other schedulers only accept the job.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote

from torchrelay.errors import UsageError, install_command
from torchrelay.runners.distributed import launcher
from torchrelay.runners.monitoring.console import Output
from torchrelay.tools.launch.local import RequestsToEnd
from torchrelay.tools.launch.outcome import evidence_of, verdict_of
from torchrelay.tools.launch.request import LaunchFile, LaunchRequest, form_of, read_options

SCRIPT, ENVIRONMENT = "torchx.sh", "environment.json"
LOCAL = "local_"
LOCAL_NOTICE_SECS = 10
"""Fixed time from SIGTERM to SIGKILL of TorchX's local schedulers."""
_LOOK_SECS = 0.2
_LEAVE_SECS = 30.0
"""Time for TorchX itself to end after its ranks' notice."""


def files(request: LaunchRequest) -> tuple[LaunchFile, ...]:
    """Return the script that runs `torchx`, and a file with the ranks' environment if any. Pure.

    Raises UsageError for unknown options and unsupported limits.
    """
    given = read_options(request, _READ, "TorchX")
    scheduler = given.pop("scheduler", "local_cwd")
    here = scheduler.startswith(LOCAL)
    if request.time_limit is not None:
        raise UsageError("TorchX does not support --time-limit; use the scheduler's own with --set cfg=...")
    if request.restarts and here:
        raise UsageError(f"TorchX's {scheduler} does not support --max-restarts; use --local")
    notice = min(request.notice, LOCAL_NOTICE_SECS) if here else request.notice
    cfg, logs = given.pop("cfg", ""), f"log_dir={request.logs / 'torchx'}"
    known = cfg.startswith("log_dir=") or ",log_dir=" in cfg
    if here and not known and "," not in logs:  # local schedulers log to the directory of the launch
        cfg = ",".join([logs, *([cfg] if cfg else [])])
    variables = request.logs / ENVIRONMENT
    words = [
        ["-m", "torchx.cli.main", "run", "-s", scheduler, *(["--wait", "--log"] if here else [])],
        *([["-cfg", cfg]] if cfg else []),
        [f"{Path(__file__).with_name('torchx_component.py')}:job"],
        ["--layout", str(request.layout), "--name", request.name, "--notice", str(notice)],
        ["--python", given.pop("python", request.python if here else "python3")],
        *([["--run", request.run]] if request.run is not None else []),
        *([["--environment", str(variables)]] if request.environment else []),
        *([["--restarts", str(request.restarts)]] if request.restarts else []),
        *([f"--{_COMPONENT[key]}", value] for key, value in given.items()),
        ["--", *request.command],
    ]
    lines = [quote(request.python), *(" ".join(map(quote, some)) for some in words)]
    text = f"""#!/bin/sh
# {request.layout}: {request.layout.ranks} ranks by TorchX's {scheduler}. Run by `torchrelay launch --torchx`.
cd {quote(str(request.workdir))} || exit
exec {_CONTINUED.join(lines)}
"""
    script = LaunchFile(SCRIPT, text, executable=True)
    if not request.environment:
        return (script,)
    return script, LaunchFile(ENVIRONMENT, json.dumps(dict(request.environment), indent=1) + "\n")


def submit(request: LaunchRequest, directory: Path, output: Output) -> int:
    """Run the script in `directory`; returns the exit code, 0 for a job that a cluster has accepted."""
    if importlib.util.find_spec("torchx") is None:
        raise UsageError(f"TorchX is not installed: {install_command('torchx')}")
    notes = directory / "attempt_0"
    notes.mkdir()
    with RequestsToEnd() as asked:
        well = _run(directory / SCRIPT, notes, asked, LOCAL_NOTICE_SECS + _LEAVE_SECS)
    if not read_options(request, _READ, "TorchX").get("scheduler", LOCAL).startswith(LOCAL):
        if not well:
            raise UsageError("torchx did not accept the job, see its output above")
        return 0
    verdict = verdict_of(evidence_of(notes, well=well, nodes=request.layout.nodes, asked=asked.name))
    output.notice(f"exit code {verdict.code}: {verdict.why}")
    return verdict.code


_CONTINUED = " \\\n  "


def _run(script: Path, notes: Path, asked: RequestsToEnd, leave_secs: float) -> bool:
    """Run the script in its own session, forwarding signals once; returns True on exit code 0."""
    environment = {**os.environ, launcher.DIRECTORY: str(notes)}
    process = subprocess.Popen(["/bin/sh", str(script)], env=environment, start_new_session=True)  # noqa: S603
    end: float | None = None
    try:
        while process.poll() is None and not asked.hurry and (end is None or time.monotonic() < end):
            if asked.pending is not None:
                number, asked.pending = asked.pending, None
                process.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)
                end = end or time.monotonic() + leave_secs
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode == 0


def _any(key: str, text: str) -> str:
    if not text.strip():
        raise UsageError(f"--set {key} is empty")
    return text


_scheduler = form_of("[A-Za-z_][A-Za-z0-9_]*", 60, ": expected a scheduler, see torchx run --help")
_whole = form_of("[0-9]+", 9, ": expected a whole number")
_READ: Mapping[str, Callable[[str, str], str]] = {
    "scheduler": _scheduler,
    "cfg": _any,
    "image": _any,
    "python": _any,
    "port": _whole,
    "cpu": _whole,
    "gpus": _whole,
    "memory": _whole,
}
_COMPONENT = {"image": "image", "port": "port", "cpu": "cpu", "gpus": "gpu", "memory": "memory"}
