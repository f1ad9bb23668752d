"""What only Kubernetes understands of a launch, checked before a cluster refuses it; YAML of plain values.

A text stands without quotes only where every reader, of YAML 1.1 and of 1.2, takes it for a text; `y`, `1e3`
and `0o17` are something else to some. All else is quoted and escaped. Keys stand in the order given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

import yaml

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.tools.launch.request import LaunchRequest, read_options, shown

LABEL = 63
"""The longest part of a host name: RFC 1123."""
KINDS = ("job", "trainjob")
_MANY = ("pvc", "secret")
PORT = 29400
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_VARIABLE = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*")
_JOB = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")


def job_name(name: str, longest_tail: str) -> str:
    """Check the name of a job whose pods are called `<name><tail>`; raises UsageError.

    It is the first part of the host names of its pods, so it begins with a letter, and the longest of them
    has 63 characters.
    """
    room = LABEL - len(longest_tail)
    if _JOB.fullmatch(name) is None:
        raise UsageError(
            f"the name {shown(name)} cannot be a Kubernetes job's: give --name of small letters a-z, "
            "digits and -, with a letter first and no - last"
        )
    if len(name) > room:
        raise UsageError(
            f"the name {shown(name)} has {len(name)} characters; at most {room} fit, because its pods are "
            f"called <name>{longest_tail}: give a shorter --name"
        )
    return name


def _form(pattern: str, most: int, complaint: str) -> Callable[[str, str], str]:
    """What reads a text of a form and of at most so many characters."""
    form = re.compile(pattern)

    def read(key: str, text: str) -> str:
        if len(text) > most or not text.isprintable() or form.fullmatch(text) is None:
            raise UsageError(f"--set {key}={shown(text)}{complaint}")
        return text

    return read


def variable_name(name: str) -> str:
    """Check the name of an environment variable."""
    if _VARIABLE.fullmatch(name) is None:
        raise UsageError(
            f"the variable {shown(name)} cannot be given to a pod: its name is of A-Z a-z 0-9 _ - . "
            "and does not begin with a digit"
        )
    return name


def literal(what: str, text: str) -> str:
    """A text that a pod gets as it is: `$` is doubled, or `$(NAME)` would be replaced.

    Raises UsageError for what is no text: bytes that are no UTF-8. It does not show them: they may be secret.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is no UTF-8: a manifest cannot hold it") from None
    return text.replace("$", "$$")


@dataclass(frozen=True)
class VolumeClaim:
    """A persistent volume claim, and where its volume lies in the container."""

    claim: str
    path: str


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value stays in the cluster: an entry of one of its secrets."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True)
class KubernetesOptions:
    """Checked; amounts are Kubernetes' own, such as `64Gi`, and for one host. None: not asked for."""

    image: str
    kind: str = "job"
    namespace: str | None = None
    python: str = "python3"
    workdir: str | None = None
    pvc: tuple[VolumeClaim, ...] = ()
    secret: tuple[SecretVariable, ...] = ()
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str | None = None
    memory: str | None = None
    shm: str | None = None
    port: int = PORT
    service_account: str | None = None
    pull_secret: str | None = None
    runtime: str = "torch-distributed"
    queue: str | None = field(default=None)
    """Kueue's, which starts all pods of a job together or none."""


def options_of(request: LaunchRequest) -> KubernetesOptions:
    """Read and check what `--set` gave; raises UsageError, which names the key and what it takes."""
    read = read_options(request, _READ, "Kubernetes", _MANY)
    if "image" not in read:
        raise UsageError(
            "Kubernetes runs images: give --set image=NAME, one with torchrelay and the program in it"
        )
    found = KubernetesOptions(**read)
    paths = [claim.path for claim in found.pvc]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UsageError(f"--set pvc: two volumes cannot both lie at {twice}")
    return found


_object_name = _form(
    rf"{_LABEL}(\.{_LABEL})*", 253,
    " names nothing in Kubernetes: it takes small letters a-z, digits, - and .",
)  # fmt: skip
_label_name = _form(_LABEL, LABEL, f" is no name of 1 to {LABEL} small letters a-z, digits and -")
_path = _form("/[^:]*", sys.maxsize, " is no absolute path in the container, such as /runs")
_entry = _form("[-._A-Za-z0-9]+", 253, ": no entry of a secret is called so")
_quantity = _form(
    r"(?=.*[1-9])[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTPE]|[KMGTPE]i)?", sys.maxsize,
    " is no amount: give one such as 4, 500m or 64Gi",
)  # fmt: skip


def _claim(key: str, text: str) -> VolumeClaim:
    claim, _, path = text.partition(":")
    if not path:
        raise UsageError(f"--set {key}={shown(text)}: give CLAIM:PATH such as runs:/runs")
    return VolumeClaim(_object_name(key, claim), _path(key, path))


def _secret(key: str, text: str) -> SecretVariable:
    variable, _, place = text.partition(":")
    secret, _, entry = place.partition("/")
    if not entry:
        raise UsageError(f"--set {key}={shown(text)}: give VARIABLE:SECRET/ENTRY such as HF_TOKEN:hub/token")
    return SecretVariable(variable_name(variable), _object_name(key, secret), _entry(key, entry))


def _whole(least: int, most: int) -> Callable[[str, str], int]:
    def read(key: str, text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
            raise UsageError(f"--set {key}={shown(text)}: a whole number from {least} to {most} is expected")
        return int(text)

    return read


def _python(key: str, text: str) -> str:
    if not text.strip():
        raise UsageError(f"--set {key} is empty: give the interpreter in the image, such as python3")
    return literal(f"--set {key}", text)


_READ: Mapping[str, Callable[[str, str], object]] = {
    "image": _form("[!-~]+", 500, " is no image: give one such as registry.example/train:1"),
    "kind": _form("|".join(KINDS), LABEL, f": one of {', '.join(KINDS)}"),
    "namespace": _label_name,
    "python": _python,
    "workdir": _path,
    "pvc": _claim,
    "secret": _secret,
    "gpus": _whole(0, 1024),
    "gpu_resource": _form(
        "([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?", 253 + 1 + LABEL,
        " is no resource of a node: give one such as nvidia.com/gpu",
    ),
    "cpu": _quantity,
    "memory": _quantity,
    "shm": _quantity,
    "port": _whole(1, 65535),
    "service_account": _object_name,
    "pull_secret": _object_name,
    "runtime": _object_name,
    "queue": _label_name,
}  # fmt: skip


_PLAIN = re.compile(r"(--?)?[A-Za-z/]([A-Za-z0-9_./:=@-]*[A-Za-z0-9_./-])?")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def documents(several: Iterable[Mapping[str, Any]], head: str = "") -> str:
    """Several documents as one text; every line of `head` becomes a comment above them."""
    comments = "".join(f"# {line}\n" for line in head.splitlines())
    text: str = yaml.dump_all(
        [dict(one) for one in several],
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        explicit_start=True,
        width=1 << 30,
    )
    return comments + text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """A value that stands twice is written twice."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists stand below their key, not beside it."""
        super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)
