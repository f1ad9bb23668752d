"""What only Kubernetes understands of a launch, as `--set KEY=VALUE` gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.launch import kubernetes_names as names
from torchrelay.runners.launch.request import LaunchRequest

KINDS = ("job", "trainjob")
_MANY = ("pvc", "secret")
PORT = 29400
LONGEST_IMAGE = 500


@dataclass(frozen=True)
class Claim:
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
    pvc: tuple[Claim, ...] = ()
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
            raise UsageError(
                f"--set {names.shown(key)} means nothing to Kubernetes; known are {', '.join(_READ)}"
            )
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
        raise UsageError(
            f"--set {key}={names.shown(text)} is no image: give one such as registry.example/train:1"
        )
    return text


def _kind(key: str, text: str) -> str:
    if text not in KINDS:
        raise UsageError(f"--set {key}={names.shown(text)}: one of {', '.join(KINDS)}")
    return text


def _claim(key: str, text: str) -> Claim:
    claim, _, path = text.partition(":")
    if not path:
        raise UsageError(f"--set {key}={names.shown(text)}: give CLAIM:PATH such as runs:/runs")
    return Claim(names.object_name(key, claim), names.absolute_path(key, path))


def _secret(key: str, text: str) -> SecretVariable:
    variable, _, place = text.partition(":")
    secret, _, entry = place.partition("/")
    if not entry:
        raise UsageError(
            f"--set {key}={names.shown(text)}: give VARIABLE:SECRET/ENTRY such as HF_TOKEN:hub/token"
        )
    return SecretVariable(
        names.variable(variable), names.object_name(key, secret), names.secret_key(key, entry)
    )


def _whole(least: int, most: int) -> Callable[[str, str], int]:
    def read(key: str, text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
            raise UsageError(
                f"--set {key}={names.shown(text)}: a whole number from {least} to {most} is expected"
            )
        return int(text)

    return read


def _python(key: str, text: str) -> str:
    if not text.strip():
        raise UsageError(f"--set {key} is empty: give the interpreter in the image, such as python3")
    return names.literal(f"--set {key}", text)


_READ: Mapping[str, Callable[[str, str], object]] = {
    "image": _image,
    "kind": _kind,
    "namespace": names.label_name,
    "python": _python,
    "workdir": names.absolute_path,
    "pvc": _claim,
    "secret": _secret,
    "gpus": _whole(0, 1024),
    "gpu_resource": names.resource,
    "cpu": names.quantity,
    "memory": names.quantity,
    "shm": names.quantity,
    "port": _whole(1, 65535),
    "service_account": names.object_name,
    "pull_secret": names.object_name,
    "runtime": names.object_name,
    "queue": names.label_name,
}
