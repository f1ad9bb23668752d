"""How an agent of torchrun is started, as text for a shell, which never runs anything of a user's words."""

from __future__ import annotations

from collections.abc import Iterable
from shlex import quote

from torchrelay.runners.launch.request import LaunchRequest

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
GRACE_SECS = 30
"""What the ranks get between a signal and SIGKILL where nobody said more: torchrun's default."""


def agent_command(request: LaunchRequest, endpoint: str, launch_id: str, grace_secs: int = GRACE_SECS) -> str:
    """One agent of the launch, a line of a shell script per option.

    `endpoint` and `launch_id` are put between double quotes, so that the script may fill in its variables.
    """
    layout = request.layout
    words = [
        f"{quote(request.python)} -m torchrelay.runners.launch.agent",
        f"--nnodes={layout.nodes} --nproc-per-node={layout.per_node}",
        f'--rdzv-backend=c10d --rdzv-endpoint="{endpoint}" --rdzv-id="{launch_id}"',
        f"--signals-to-handle={_SIGNALS} --shutdown-timeout={grace_secs}",
        " ".join(quote(word) for word in request.command),
    ]
    return " \\\n  ".join(words)


def exports(request: LaunchRequest) -> str:
    """The lines that give the ranks their environment: what a launch needs, then what `--env` says."""
    return "".join(f"export {line}\n" for line in _exports(request))


def _exports(request: LaunchRequest) -> Iterable[str]:
    # torchrun's agent store keeps the addresses of an earlier start, and gloo then connects to nobody.
    yield "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    if request.layout.per_node > 1:
        yield 'OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"'
    for name, value in request.environment:
        yield f"{name}={quote(value)}"
