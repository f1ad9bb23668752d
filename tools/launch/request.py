"""What a launch was told, in one frozen value: its layout, target, command, directory and agents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any, Protocol, cast

from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output

_FORM = re.compile(r"(?:([1-9][0-9]{0,5})x)?([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Layout:
    """`nodes` hosts with `per_node` ranks each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """All of them: the world size."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}"


def layout_of(text: str) -> Layout:
    """`2x8` is two nodes of eight ranks, `8` one node of eight; raises UsageError for anything else."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(
            f"-j {text!r} is no layout: give NODESxRANKS_PER_NODE such as 2x8, or one number for one node"
        )
    return Layout(int(found[1] or 1), int(found[2]))


@dataclass(frozen=True)
class LaunchRequest:
    """A command on a layout.

    `command` is what torchrun takes: a script and its arguments, or `-m MODULE ARGS`. `run` is the run
    directory or URL, None where the command alone knows it (it is heard from the ranks then). `logs` is the
    directory of this launch: its files, and one directory per attempt. `time_limit` and `notice` (how long
    before its end the program is told) are seconds. `restarts` is how often the ranks may be started again.
    `environment` holds what was given by `--env`, never the launcher's own surroundings. `python` is the
    interpreter where the ranks run.
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
    options: tuple[tuple[str, str], ...] = field(default=())
    """What only one target understands (partition, image, queue ...), as given by `--set KEY=VALUE`."""
    python: str = "python"


@dataclass(frozen=True)
class LaunchFile:
    """A readable file that a target makes of a request: printed by `--dry-run`, submitted otherwise."""

    name: str
    text: str
    executable: bool = False


def check_notice(request: LaunchRequest) -> None:
    """Refuse a time limit that is over before its notice (UsageError)."""
    if request.time_limit is not None and request.time_limit <= request.notice:
        raise UsageError(
            f"a time limit of {request.time_limit} s leaves nothing before the notice of {request.notice} s: "
            "give a longer --time-limit or a shorter --notice"
        )


def read_options(
    request: LaunchRequest, known: Mapping[str, Callable[[str, str], Any]], who: str, many: Sequence[str] = ()
) -> dict[str, Any]:
    """What `--set` gave, each read by its own reader, of `many` all in a tuple; raises UsageError."""
    found: dict[str, Any] = {}
    for key, text in request.options:
        if key not in known:
            raise UsageError(f"--set {shown(key)} means nothing to {who}; known are {', '.join(known)}")
        if key in found and key not in many:
            raise UsageError(f"--set {key} stands twice: give it once")
        value = known[key](key, text)
        found[key] = (*found.get(key, ()), value) if key in many else value
    return found


def shown(text: str) -> str:
    """A text as a message shows it: on one line and not long."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


_MOST = 1_000_000


def next_directory(logs: Path, name: str) -> Path:
    """The directory that a launch of this name would get now: `NAME.0`, `NAME.1`, ... Makes nothing."""
    taken = {path.name for path in logs.iterdir()} if logs.is_dir() else set()
    free = (number for number in range(_MOST) if f"{name}.{number}" not in taken)
    return logs / f"{name}.{next(free)}"


def make_directory(logs: Path, name: str) -> Path:
    """Make the next directory and return it; of two launches at the same time each gets its own."""
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
                f"cannot make {found} for the files of this launch: {error.strerror}"
            ) from error
        else:
            return found


def write_files(files: Sequence[LaunchFile], directory: Path) -> None:
    """Write them below the directory of the launch, as they would be printed."""
    (directory / ".gitignore").write_text("*\n")  # logs are no source of the run
    for one in files:
        path = directory / one.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.text)
        path.chmod(0o755 if one.executable else 0o644)


_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
GRACE_SECS = 30
"""What the ranks get between a signal and SIGKILL where nobody said more: torchrun's default."""


def agent_command(request: LaunchRequest, endpoint: str, launch_id: str, grace_secs: int = GRACE_SECS) -> str:
    """One agent of the launch, a line of a shell script per option.

    `endpoint` and `launch_id` are put between double quotes, so that the script may fill in its variables.
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
    """The lines that give the ranks their environment: what a launch needs, then what `--env` says."""
    return "".join(f"export {line}\n" for line in _exports(request))


def _exports(request: LaunchRequest) -> Iterable[str]:
    # torchrun's agent store keeps the addresses of an earlier start, and gloo then connects to nobody.
    yield "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    if request.layout.per_node > 1:
        yield 'OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"'
    for name, value in request.environment:
        yield f"{name}={quote(value)}"


class LaunchTarget(Protocol):
    """What the module of a target has: two functions of these names."""

    def files(self, request: LaunchRequest) -> tuple[LaunchFile, ...]:
        """The files of a launch. Pure; raises UsageError for a request that this target cannot serve."""

    def submit(self, request: LaunchRequest, directory: Path, output: Output) -> int:
        """Start what `files` made, which lies in `directory` under its names; returns the exit code."""


@dataclass(frozen=True)
class Row:
    """A target: its module in this package, and its line in the help of `launch`.

    `here`: the script that is started lies on this machine, too, so that a mistyped name is seen at once.
    """

    module: str
    help: str
    here: bool = True


TARGETS = {
    "local": Row("local", "on this machine, and wait for the end (the default)"),
    "slurm": Row("slurm", "by sbatch; preempted runs are queued again"),
    "k8s": Row("kubernetes", "as a Job of Kubernetes, or a TrainJob of Kubeflow", here=False),
    "torchx": Row("torchx", "by one of TorchX's schedulers", here=False),
}
"""By the name of the option that chooses it."""


def target(name: str) -> LaunchTarget:
    """The module of a target; `name` is a key of TARGETS."""
    return cast(LaunchTarget, import_module(f"{__package__}.{TARGETS[name].module}"))


_CONFIGS = (".yaml", ".yml")
_RUN = ("-m", "torchrelay", "run", "-m")


def command_of(words: Sequence[str], run: str | None) -> tuple[str, ...]:
    """A script with its arguments, or `-m MODULE ...`.

    `-m config.yaml` (or a directory with a config.yaml) is `torchrelay run` of it, which is told where the
    `run` goes. Raises UsageError where there is no command.
    """
    command = list(words[1:] if words and words[0] == "--" else words)
    if not command or command == ["-m"]:
        raise UsageError("launch what? give a script, or -m with a module or a configuration, behind --")
    if command[0] == "-m":
        return _module(command[1], command[2:], run)
    if command[0].startswith("-"):
        raise UsageError(f"launch has no option {command[0]}: options stand before --, behind it the script")
    return tuple(command)


def check_script(command: Sequence[str]) -> None:
    """Refuse a script, or a configuration, that is not there (UsageError)."""
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise UsageError(f"there is no script {command[0]}: name a Python file, or -m and a module")
    if tuple(command[:4]) == _RUN and not Path(command[4]).exists():
        raise UsageError(
            f"there is no configuration {command[4]}: -m takes a YAML file, or a module of Python"
        )


def _module(name: str, rest: Sequence[str], run: str | None) -> tuple[str, ...]:
    if not (name.endswith(_CONFIGS) or (Path(name) / "config.yaml").is_file()):
        return ("-m", name, *rest)
    there = () if run is None or "--run-dir" in rest else ("--run-dir", run)
    return (*_RUN, name, *rest, *there)
