"""What only Kubernetes understands of a launch, checked before a cluster refuses it; YAML of plain values.

A text stands without quotes only where every reader, of YAML 1.1 and of 1.2, takes it for a text; `y`, `1e3`
and `0o17` are something else to some. All else is quoted and escaped. Keys stand in the order given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

import yaml

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.tools.launch.request import LaunchRequest

LABEL = 63
"""The longest part of a host name: RFC 1123."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTPE]|[KMGTPE]i)?")
_VARIABLE = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*")
_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")
_RESOURCE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")


def job_name(name: str, longest_tail: str) -> str:
    """Check the name of a job whose pods are called `<name><tail>`; raises UsageError.

    It is the first part of the host names of its pods, so it begins with a letter, and the longest of them
    has 63 characters.
    """
    room = LABEL - len(longest_tail)
    if _LABEL.fullmatch(name) is None:
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


def object_name(what: str, text: str) -> str:
    """Check the name of something that lies in the cluster: a claim, a secret, an account."""
    if len(text) > 253 or _SUBDOMAIN.fullmatch(text) is None:
        raise UsageError(
            f"--set {what}={shown(text)} names nothing in Kubernetes: it takes small letters a-z, "
            "digits, - and ."
        )
    return text


def label_name(what: str, text: str) -> str:
    """Check a name that is one part of a host name, as a namespace's is."""
    if len(text) > LABEL or not _SUBDOMAIN.fullmatch(text) or "." in text:
        raise UsageError(
            f"--set {what}={shown(text)} is no name of 1 to {LABEL} small letters a-z, digits and -"
        )
    return text


def quantity(what: str, text: str) -> str:
    """Check an amount such as `500m`, `1.5` or `64Gi`; it is above zero."""
    if _QUANTITY.fullmatch(text) is None or not re.search(r"[1-9]", text):
        raise UsageError(f"--set {what}={shown(text)} is no amount: give one such as 4, 500m or 64Gi")
    return text


def resource(what: str, text: str) -> str:
    """Check the name under which a cluster counts a device, such as `nvidia.com/gpu`."""
    if len(text) > 253 + 1 + LABEL or _RESOURCE.fullmatch(text) is None:
        raise UsageError(
            f"--set {what}={shown(text)} is no resource of a node: give one such as nvidia.com/gpu"
        )
    return text


def variable_name(name: str) -> str:
    """Check the name of an environment variable."""
    if _VARIABLE.fullmatch(name) is None:
        raise UsageError(
            f"the variable {shown(name)} cannot be given to a pod: its name is of A-Z a-z 0-9 _ - . "
            "and does not begin with a digit"
        )
    return name


def secret_key(what: str, text: str) -> str:
    """Check the name of an entry of a secret."""
    if _KEY.fullmatch(text) is None:
        raise UsageError(f"--set {what}={shown(text)}: no entry of a secret is called so")
    return text


def absolute_path(what: str, text: str) -> str:
    """Check a path inside of a container."""
    if not text.startswith("/") or ":" in text or not text.isprintable():
        raise UsageError(f"--set {what}={shown(text)} is no absolute path in the container, such as /runs")
    return text


def literal(what: str, text: str) -> str:
    """A text that a pod gets as it is: `$` is doubled, or `$(NAME)` would be replaced.

    Raises UsageError for what is no text: bytes that are no UTF-8. It does not show them: they may be secret.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is no UTF-8: a manifest cannot hold it") from None
    return text.replace("$", "$$")


def shown(text: str) -> str:
    """A text as a message shows it: on one line and not long."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


KINDS = ("job", "trainjob")
_MANY = ("pvc", "secret")
PORT = 29400
LONGEST_IMAGE = 500


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
    given: dict[str, list[str]] = {}
    for key, value in request.options:
        if key not in _READ:
            raise UsageError(f"--set {shown(key)} means nothing to Kubernetes; known are {', '.join(_READ)}")
        if key in given and key not in _MANY:
            raise UsageError(f"--set {key} stands twice: give it once")
        given.setdefault(key, []).append(value)
    if "image" not in given:
        raise UsageError(
            "Kubernetes runs images: give --set image=NAME, one with torchrelay and the program in it"
        )
    read: dict[str, Any] = {}
    for key, texts in given.items():
        values = tuple(_READ[key](key, text) for text in texts)
        read[key] = values if key in _MANY else values[0]
    found = KubernetesOptions(**read)
    _check_volumes(found)
    return found


def _check_volumes(found: KubernetesOptions) -> None:
    paths = [claim.path for claim in found.pvc]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UsageError(f"--set pvc: two volumes cannot both lie at {twice}")


def _image(key: str, text: str) -> str:
    if not text or len(text) > LONGEST_IMAGE or not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(f"--set {key}={shown(text)} is no image: give one such as registry.example/train:1")
    return text


def _kind(key: str, text: str) -> str:
    if text not in KINDS:
        raise UsageError(f"--set {key}={shown(text)}: one of {', '.join(KINDS)}")
    return text


def _claim(key: str, text: str) -> VolumeClaim:
    claim, _, path = text.partition(":")
    if not path:
        raise UsageError(f"--set {key}={shown(text)}: give CLAIM:PATH such as runs:/runs")
    return VolumeClaim(object_name(key, claim), absolute_path(key, path))


def _secret(key: str, text: str) -> SecretVariable:
    variable, _, place = text.partition(":")
    secret, _, entry = place.partition("/")
    if not entry:
        raise UsageError(f"--set {key}={shown(text)}: give VARIABLE:SECRET/ENTRY such as HF_TOKEN:hub/token")
    return SecretVariable(variable_name(variable), object_name(key, secret), secret_key(key, entry))


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
    "image": _image,
    "kind": _kind,
    "namespace": label_name,
    "python": _python,
    "workdir": absolute_path,
    "pvc": _claim,
    "secret": _secret,
    "gpus": _whole(0, 1024),
    "gpu_resource": resource,
    "cpu": quantity,
    "memory": quantity,
    "shm": quantity,
    "port": _whole(1, 65535),
    "service_account": object_name,
    "pull_secret": object_name,
    "runtime": object_name,
    "queue": label_name,
}


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
