"""Options of Kubernetes launches, validated before submission, and their YAML output.

A string is written without quotes only if YAML 1.1 and 1.2 both read it as a string (not so `y`, `1e3` and
`0o17`); all others are quoted. Keys keep their order.
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
"""Longest label of a host name (RFC 1123)."""
KINDS = ("job", "trainjob")
_MANY = ("pvc", "secret")
PORT = 29400
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_VARIABLE = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*")
_JOB = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")


def job_name(name: str, longest_tail: str) -> str:
    """Check the name of a job whose pods are called `<name><tail>`; raises UsageError.

    Pod names are host name labels: they begin with a letter and have at most 63 characters.
    """
    room = LABEL - len(longest_tail)
    if _JOB.fullmatch(name) is None:
        raise UsageError(
            f"invalid job name {shown(name)}: expected --name of lowercase letters, digits and -, "
            "beginning with a letter and not ending with -"
        )
    if len(name) > room:
        raise UsageError(
            f"invalid job name {shown(name)}: expected at most {room} characters, because its pods are "
            f"called <name>{longest_tail}"
        )
    return name


def _form(pattern: str, most: int, complaint: str) -> Callable[[str, str], str]:
    """Return a reader of texts that match a pattern and have at most `most` characters."""
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
            f"invalid variable name {shown(name)}: expected A-Z a-z 0-9 _ - . without a leading digit"
        )
    return name


def literal(what: str, text: str) -> str:
    """Escape `$` as `$$`, so that the cluster does not expand `$(NAME)`.

    Raises UsageError for bytes that are not UTF-8, without showing them, because they may be secret.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8, so a manifest cannot contain it") from None
    return text.replace("$", "$$")


@dataclass(frozen=True)
class VolumeClaim:
    """A persistent volume claim and its mount path in the container."""

    claim: str
    path: str


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value is an entry of a secret in the cluster."""

    variable: str
    secret: str
    key: str


@dataclass(frozen=True)
class KubernetesOptions:
    """Validated options; quantities have Kubernetes' form, such as `64Gi`, and are per host."""

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
    """Kueue queue, which starts all pods of a job together."""


def options_of(request: LaunchRequest) -> KubernetesOptions:
    """Parse and check the `--set` options; raises UsageError with the key and the expected form."""
    read = read_options(request, _READ, "Kubernetes", _MANY)
    if "image" not in read:
        raise UsageError("image is missing: give --set image=NAME, an image with torchrelay and the program")
    found = KubernetesOptions(**read)
    paths = [claim.path for claim in found.pvc]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UsageError(f"--set pvc: two volumes have the same path {twice}")
    return found


_object_name = _form(
    rf"{_LABEL}(\.{_LABEL})*", 253,
    ": expected a Kubernetes name of lowercase letters, digits, - and .",
)  # fmt: skip
_label_name = _form(_LABEL, LABEL, f": expected 1 to {LABEL} lowercase letters, digits and -")
_path = _form("/[^:]*", sys.maxsize, ": expected an absolute path in the container, such as /runs")
_entry = _form("[-._A-Za-z0-9]+", 253, ": expected the name of an entry of a secret")
_quantity = _form(
    r"(?=.*[1-9])[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTPE]|[KMGTPE]i)?", sys.maxsize,
    ": expected a quantity such as 4, 500m or 64Gi",
)  # fmt: skip


def _claim(key: str, text: str) -> VolumeClaim:
    claim, _, path = text.partition(":")
    if not path:
        raise UsageError(f"--set {key}={shown(text)}: expected CLAIM:PATH such as runs:/runs")
    return VolumeClaim(_object_name(key, claim), _path(key, path))


def _secret(key: str, text: str) -> SecretVariable:
    variable, _, place = text.partition(":")
    secret, _, entry = place.partition("/")
    if not entry:
        raise UsageError(
            f"--set {key}={shown(text)}: expected VARIABLE:SECRET/ENTRY such as HF_TOKEN:hub/token"
        )
    return SecretVariable(variable_name(variable), _object_name(key, secret), _entry(key, entry))


def _whole(least: int, most: int) -> Callable[[str, str], int]:
    def read(key: str, text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
            raise UsageError(f"--set {key}={shown(text)}: expected a whole number from {least} to {most}")
        return int(text)

    return read


def _python(key: str, text: str) -> str:
    if not text.strip():
        raise UsageError(f"--set {key} is empty: expected the interpreter in the image, such as python3")
    return literal(f"--set {key}", text)


_READ: Mapping[str, Callable[[str, str], object]] = {
    "image": _form("[!-~]+", 500, ": expected an image such as registry.example/train:1"),
    "kind": _form("|".join(KINDS), LABEL, f": expected one of {', '.join(KINDS)}"),
    "namespace": _label_name,
    "python": _python,
    "workdir": _path,
    "pvc": _claim,
    "secret": _secret,
    "gpus": _whole(0, 1024),
    "gpu_resource": _form(
        "([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?", 253 + 1 + LABEL,
        ": expected a resource of a node such as nvidia.com/gpu",
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
    """Join several YAML documents; the lines of `head` become a comment at the top."""
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
        """Write a repeated value again instead of an alias."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key."""
        super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)
