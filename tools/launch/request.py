"""The launch request: layout, target, command, directories and agent command lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any

from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass

_FORM = re.compile(r"(?:([1-9][0-9]{0,5})x)?([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Layout:
    """`nodes` hosts with `per_node` ranks each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}"


def layout_of(text: str) -> Layout:
    """Parse a layout: `2x8` is two nodes of eight ranks, `8` is one node. Raises UsageError."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(
            f"invalid layout -j {text!r}: expected NODESxRANKS_PER_NODE such as 2x8, or a number of ranks"
        )
    return Layout(int(found[1] or 1), int(found[2]))


@dataclass(frozen=True)
class LaunchRequest:
    """A command on a layout.

    Attributes:
        command: Script and arguments, or `-m MODULE ARGS`, as for torchrun.
        run: Run directory or URL; None if the ranks report it.
        logs: Directory of this launch, with its files and one directory per attempt.
        time_limit: Seconds that the launch may run.
        notice: Seconds before the time limit at which the program is asked to save and exit.
        restarts: How often the ranks may be restarted.
        environment: Variables given by `--env`, without the launcher's own environment.
        options: Options of one target (partition, image, queue ...), given by `--set KEY=VALUE`.
        python: Interpreter on the hosts of the ranks.
    """

    layout: Layout
    command: tuple[str, ...]
    workdir: Path
    name: str = "torchrelay"
    run: str | None = None
    logs: Path = Path("launch")
    time_limit: int | None = None
    notice: int = 300
    restarts: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    python: str = "python"


@dataclass(frozen=True)
class LaunchFile:
    """A file that a target generates: printed by `--dry-run`, submitted otherwise."""

    name: str
    text: str
    executable: bool = False


def check_notice(request: LaunchRequest) -> None:
    """Raise UsageError if the time limit is not longer than the notice."""
    if request.time_limit is not None and request.time_limit <= request.notice:
        raise UsageError(
            f"--time-limit of {request.time_limit} s is not longer than --notice of {request.notice} s"
        )


def read_options(
    request: LaunchRequest, known: Mapping[str, Callable[[str, str], Any]], who: str, many: Sequence[str] = ()
) -> dict[str, Any]:
    """Parse the `--set` options with their readers; repeatable keys (`many`) give tuples. UsageError."""
    found: dict[str, Any] = {}
    for key, text in request.options:
        if key not in known:
            raise UsageError(f"unknown option --set {shown(key)} of {who}; known are {', '.join(known)}")
        if key in found and key not in many:
            raise UsageError(f"--set {key} is given twice")
        value = known[key](key, text)
        found[key] = (*found.get(key, ()), value) if key in many else value
    return found


def form_of(pattern: str, most: int, complaint: str) -> Callable[[str, str], str]:
    """Return a reader of texts that match a pattern and have at most `most` characters."""
    form = re.compile(pattern)

    def read(key: str, text: str) -> str:
        if len(text) > most or not text.isprintable() or form.fullmatch(text) is None:
            raise UsageError(f"--set {key}={shown(text)}{complaint}")
        return text

    return read


def shown(text: str) -> str:
    """Shorten a text for a message: quoted, on one line."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


_MOST = 1_000_000


def next_directory(logs: Path, name: str) -> Path:
    """Return the directory that a launch would get now: `NAME.0`, `NAME.1`, ... Creates nothing."""
    taken = {path.name for path in logs.iterdir()} if logs.is_dir() else set()
    free = (number for number in range(_MOST) if f"{name}.{number}" not in taken)
    return logs / f"{name}.{next(free)}"


def make_directory(logs: Path, name: str) -> Path:
    """Create and return the next directory; concurrent launches get different ones."""
    while True:
        found = next_directory(logs, name)
        try:
            found.parent.mkdir(parents=True, exist_ok=True)
            found.mkdir()
        except FileExistsError:
            if not found.exists() or not logs.is_dir():
                raise
        except OSError as error:
            raise StorageError(
                f"cannot create {found} for the files of this launch: {error.strerror}"
            ) from error
        else:
            return found


def write_files(files: Sequence[LaunchFile], directory: Path) -> None:
    """Write the files to the directory of the launch."""
    (directory / ".gitignore").write_text("*\n")  # keep logs out of the source archive
    for one in files:
        path = directory / one.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.text)
        path.chmod(0o755 if one.executable else 0o644)


_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
GRACE_SECS = 30
"""Seconds from a signal to SIGKILL of the ranks by default, as in torchrun."""


def agent_command(request: LaunchRequest, endpoint: str, launch_id: str, grace_secs: int = GRACE_SECS) -> str:
    """Return the shell command of an agent.

    `endpoint` and `launch_id` are double-quoted, so that they may contain shell variables.
    """
    layout = request.layout
    words = [
        f"{quote(request.python)} -m torchrelay.tools.launch.agent",
        f"--nnodes={layout.nodes} --nproc-per-node={layout.per_node}",
        f'--rdzv-backend=c10d --rdzv-endpoint="{endpoint}" --rdzv-id="{launch_id}"',
        f"--signals-to-handle={_SIGNALS} --shutdown-timeout={grace_secs}",
        " ".join(quote(word) for word in request.command),
    ]
    return " \\\n  ".join(words)


def exports(request: LaunchRequest) -> str:
    """Return the shell lines that set the ranks' environment, those of `--env` last."""
    # torchrun's shared store keeps the addresses of an earlier attempt, which breaks gloo.
    lines = ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    if request.layout.per_node > 1:
        lines.append('OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"')
    lines += [f"{name}={quote(value)}" for name, value in request.environment]
    return "".join(f"export {line}\n" for line in lines)


@dataclass(frozen=True)
class Row:
    """A target: its module in this package and its help line.

    `here`: the script must exist on this machine, so that a mistyped name is reported at once.
    """

    module: str
    help: str
    here: bool = True


TARGETS = {
    "local": Row("local", "run on this machine and wait (the default)"),
    "slurm": Row("slurm", "submit with sbatch; preempted runs are requeued"),
    "k8s": Row("kubernetes", "submit a Kubernetes Job or a Kubeflow TrainJob", here=False),
    "torchx": Row("torchx", "submit to a TorchX scheduler", here=False),
}
"""Targets by the name of their option."""


def target(name: str) -> Any:
    """Import the module of a target; `name` is a key of TARGETS.

    Its functions: `files(request)` returns the files of a launch, and raises UsageError for requests that the
    target cannot serve. `submit(request, directory, output)` starts it from there; returns the exit code.
    """
    return import_module(f"{__package__}.{TARGETS[name].module}")


_RUN = ("-m", "torchrelay", "run", "-m")


def command_of(words: Sequence[str], run: str | None) -> tuple[str, ...]:
    """Return the command for torchrun: a script with its arguments, or `-m MODULE ...`.

    `-m config.yaml` (or a directory with a config.yaml) becomes `torchrelay run` with `--run-dir`. Raises
    UsageError if the command is missing.
    """
    command = list(words[1:] if words and words[0] == "--" else words)
    if not command or command == ["-m"]:
        raise UsageError("launch needs a script, or -m with a module or a configuration, after --")
    if command[0] == "-m":
        name, rest = command[1], command[2:]
        if not (name.endswith((".yaml", ".yml")) or (Path(name) / "config.yaml").is_file()):
            return ("-m", name, *rest)
        there = () if run is None or "--run-dir" in rest else ("--run-dir", run)
        return (*_RUN, name, *rest, *there)
    if command[0].startswith("-"):
        raise UsageError(f"launch has no option {command[0]}; the script follows after --")
    return tuple(command)


def check_script(command: Sequence[str]) -> None:
    """Raise UsageError if the script or configuration does not exist."""
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise UsageError(f"script {command[0]} does not exist; expected a Python file, or -m MODULE")
    if tuple(command[:4]) == _RUN and not Path(command[4]).exists():
        raise UsageError(
            f"configuration {command[4]} does not exist; -m takes a YAML file or a Python module"
        )
