"""Command-line options of programs and of `serve`, and limits of server requests. Without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Argument, Parser, arg, either, flag
from torchrelay.runners.session.stop_requests import seconds_typed


@dataclass(frozen=True)
class RequestLimits:
    """Limits of server requests in bytes, counts and seconds; larger requests are refused before allocation.

    `json_bytes` is below `body_bytes`, because parsing JSON takes ten times its text. `held_bytes` limits the
    bodies of all requests together. `queue` counts waiting samples.
    """

    body_bytes: int = 16 << 20
    json_bytes: int = 2 << 20
    depth: int = 16
    elements: int = 4 << 20
    samples: int = 256
    secs: float = 30.0
    drain_secs: float = 30.0
    queue: int = 2048
    requests: int = 4096
    connections: int = 8192
    held_bytes: int = 64 << 20
    max_batch: int = 16
    max_delay_secs: float = 0.002

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name != "max_delay_secs"):
                raise UsageError(f"invalid limit {name}={value}: expected more than 0")
        if self.max_delay_secs >= self.secs:
            raise UsageError(
                f"--max-delay-ms is {self.max_delay_secs * 1000:g}: expected less than the timeout of "
                f"{self.secs:g} s"
            )


class Budget:
    """Count the bytes of request bodies in memory; used by one thread."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def take(self, nbytes: int) -> bool:
        """Reserve bytes; returns False if there is not enough room."""
        if self.held + nbytes > self.most:
            return False
        self.held += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Release reserved bytes."""
        self.held -= nbytes


PORT = 8331


def _limit(name: str, metavar: str, text: str, factor: float = 1) -> Any:
    """Return the option of a limit with its command-line help; its unit is 1/`factor`."""
    default = getattr(RequestLimits, name)
    how = {"name": name, "metavar": metavar, "help": text, "factor": factor}
    return field(default=default if factor == 1 else default * factor, metadata=how)


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server, named as on the command line."""

    port: int = PORT
    host: str = "127.0.0.1"
    token: str | None = None
    token_file: str | None = None
    watch: bool = False
    max_batch: int = _limit("max_batch", "N", "largest batch; 1 gives the same bits as `eval`")
    max_delay_ms: float = _limit(
        "max_delay_secs", "MS", "how long a sample waits for others to fill its batch", 1000
    )
    timeout: float = _limit("secs", "SECS", "answer 503 after SECS")
    drain: float = _limit("drain_secs", "SECS", "after SIGTERM finish open requests for at most SECS")
    max_body: int = _limit("body_bytes", "BYTES", "answer 413 to larger bodies")
    max_json: int = _limit("json_bytes", "BYTES", "answer 413 to larger JSON bodies")
    max_depth: int = _limit("depth", "N", "answer 400 to JSON nested deeper")
    max_elements: int = _limit("elements", "N", "answer 413 to tensors with more elements")
    max_samples: int = _limit("samples", "N", "answer 413 to more samples in one request")
    max_queue: int = _limit("queue", "N", "answer 429 while N samples wait")

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> ServeOptions:
        """Create the options from argparse's result."""
        return cls(**{one.name: getattr(chosen, one.name) for one in fields(cls)})

    def limits(self) -> RequestLimits:
        """Return the server's limits; raises UsageError for contradicting options."""
        given = {one.metadata["name"]: getattr(self, one.name) for one in fields(self) if one.metadata}
        given["max_delay_secs"] /= 1000
        given["json_bytes"] = min(self.max_json, self.max_body)
        return RequestLimits(**given, held_bytes=max(RequestLimits.held_bytes, 4 * self.max_body))

    def words(self) -> list[str]:
        """Return the options as command-line arguments, without defaults."""
        found: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                option = f"--{one.name.replace('_', '-')}"
                found += [option] if value is True else [option, str(value)]
        return found


def port(text: str) -> int:
    """Parse a port number, as the type of an option."""
    if not (text.isascii() and text.isdecimal()) or int(text[:6]) > 65535:
        raise argparse.ArgumentTypeError(f"invalid port {text!r:.20}: expected 0 to 65535")
    return int(text)


def _positive(kind: Any) -> Any:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            value = -1
        if not 0 <= value < 10**12 or (kind is int and value < 1):
            raise argparse.ArgumentTypeError(
                f"invalid value {text!r:.40}: expected a {'whole ' if kind is int else ''}number above 0"
            )
        return value

    return read


def token_options(default: str | None = None) -> Argument:
    """Return the two options for a token; `default` is a token from the environment."""
    text = "file with the token clients must send; required unless --host is local"
    return either(
        arg("--token-file", text, "FILE"),
        arg("--token", "the token itself, visible in process lists", "TEXT", default=default),
    )


def address_options(number: int) -> tuple[Argument, ...]:
    """Return the options for the address of a server; `number` is its port."""
    return (
        arg("--port", f"port (default: {number}; 0: any free port)", "P", type=port, default=number),
        arg("--host", "address to listen on (default: 127.0.0.1, this machine only)", default="127.0.0.1"),
    )


_LIMIT_OPTIONS = tuple(
    arg(
        f"--{one.name.replace('_', '-')}",
        f"{one.metadata['help']} (default: {one.default:.15g})",
        one.metadata["metavar"],
        type=_positive(type(one.default)),
        default=one.default,
    )
    for one in fields(ServeOptions)
    if one.metadata
)


VERBS = {
    "train": "train, or resume the run of the same code and configuration",
    "test": "evaluate the newest saved epoch on the dataset `test`",
    "eval": "apply the model to files: IN... OUT",
    "server": "serve the newest saved epoch over HTTP until SIGTERM",
    "status": "show the state of the last run and what changed since; writes nothing",
    "package": "export the model of an epoch to one file that runs without this code",
    "amend": "assign the changed code to the last run",
}
_CODES = (
    "exit codes: 0 success; 1 program failed, or `status --check` found work; 2 usage error, "
    "already trained, or code changed; 3 no usable epoch; 4 in use; 5 storage error; "
    "6 a rank was lost; 75 preempted"
)


@dataclass(frozen=True)
class VerbRequest:
    """A subcommand and its options; those of other subcommands have their defaults."""

    verb: str
    force: bool = False
    retrain: bool = False
    ignore: bool = False
    retest: bool = False
    run_id: str | None = None
    epoch: str | None = None
    message: str = ""
    check: bool = False
    paths: tuple[str, ...] = ()
    config: str | None = None
    overrides: tuple[str, ...] = ()
    runs: str | None = None
    max_epochs: int | None = None
    time_limit: float | None = None
    json: bool = False
    strict_config: bool = False
    out: str | None = None
    overwrite: bool = False
    serve: ServeOptions | None = None

    @classmethod
    def of(cls, chosen: argparse.Namespace, verb: str) -> VerbRequest:
        """Create a request from argparse's result; raises UsageError for contradicting options."""
        known = {one.name: getattr(chosen, one.name) for one in fields(cls) if hasattr(chosen, one.name)}
        known |= {name: tuple(known[name]) for name in ("paths", "overrides") if name in known}
        if verb == "server":
            known["serve"] = ServeOptions.of(chosen)
        found = cls(**{**known, "verb": verb})
        if found.overrides and found.config is None:
            raise UsageError("-o needs a configuration: give its file with -m")
        if found.strict_config and found.config is None:
            raise UsageError("--strict-config needs a configuration: give its file with -m")
        if verb == "train" and found.force and found.run_id:
            raise UsageError("--force makes a new run and --run names an existing one: remove one of them")
        if verb == "eval" and len(found.paths) < 2:
            raise UsageError("eval needs input files and, last, the output file or directory: IN... OUT")
        return found


def rewind_of(request: VerbRequest) -> int | None:
    """Return the epoch that `train --epoch` rewinds to; raises UsageError for an invalid one."""
    text = request.epoch
    if text is None:
        return None
    if request.force or request.retrain:
        raise UsageError("--epoch rewinds an existing run: remove --force and --retrain")
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise UsageError(f"invalid train --epoch {text:.40}: expected the number of an epoch")
    return int(text)


def read_request(argv: Sequence[str] | None = None) -> VerbRequest:
    """Parse a script's command line; raises UsageError. After --help argparse exits with code 0."""
    parser = Parser(epilog=_CODES, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    for verb, text in VERBS.items():
        description = f"{text[0].upper()}{text[1:]}."
        one = verbs.add_parser(verb, help=text, description=description, epilog=_CODES, allow_abbrev=False)
        one.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
        add_options(one, verb)
        one.set_defaults(parser=one)
    chosen, left = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if left:
        chosen.parser.refuse(left)
    return VerbRequest.of(chosen, chosen.verb)


def add_options(parser: argparse.ArgumentParser, verb: str) -> None:
    """Define the options of a subcommand."""
    for one in (*_OPTIONS[verb], *_OF_ALL):
        one(parser)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 9):
        raise argparse.ArgumentTypeError(f"invalid number {text!r:.40}: expected a whole number, at least 1")
    return int(text)


def _run(text: str) -> Argument:
    return arg("--run", text, "ID", dest="run_id")


_NEWEST = _run("id of the run (default: the newest)")
_MESSAGE = arg("--message", "comment stored with the run", "TEXT", default="")
_USING = (
    either(
        flag("--ignore", "use the changed code with the existing weights"),
        _run("id of the run, whose archived code is used"),
    ),
    arg("--epoch", "epoch: a number, last or best (default: last)", "E"),
)
_OPTIONS: dict[str, tuple[Argument, ...]] = {
    "train": (
        either(
            flag("--force", "make a new run even if nothing changed"),
            flag("--retrain", "train the same run again from the start"),
        ),
        _run("id of a run of the same code (default: the newest)"),
        arg("--epoch", "rewind the run of this code to epoch N", "N"),
        arg("--max-epochs", "train until N epochs are done", "N", type=_count),
        arg("--time-limit", "save and exit within T; the same command resumes", "T", type=seconds_typed),
        _MESSAGE,
    ),
    "test": (*_USING, flag("--retest", "test again and replace the result")),
    "eval": (
        arg("paths", "input files and, last, the output; a directory means all its files", "PATH", nargs="+"),
        *_USING,
    ),
    "server": (
        *address_options(PORT),
        token_options(),
        flag("--watch", "switch to newer epochs when they are committed"),
        *_LIMIT_OPTIONS,
        *_USING,
    ),
    "status": (_NEWEST, flag("--check", "exit code 1 if train would train")),
    "package": (
        arg("--out", "package file to write", "FILE", required=True),
        flag("--overwrite", "replace an existing file"),
        *_USING,
    ),
    "amend": (_NEWEST, _MESSAGE),
}
_OF_ALL = (
    arg("-m", "configuration file (YAML)", "CONFIG", dest="config"),
    arg(
        "-o", "override a value of the configuration", "KEY=VALUE", dest="overrides", action="append",
        default=[],
    ),
    flag("--strict-config", "exit code 2 if a configuration key is never read"),
    arg("--runs", "directory of the runs (default: TORCHRELAY_RUNS, else set by the program)", "DIR"),
)  # fmt: skip
