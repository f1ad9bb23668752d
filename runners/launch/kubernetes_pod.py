"""The parts of a pod that all manifests share: command, environment, resources, volumes; plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.runners.launch import kubernetes_names as names
from torchrelay.runners.launch.kubernetes_options import KubernetesOptions
from torchrelay.runners.launch.on_host import words_of
from torchrelay.runners.launch.request import LaunchRequest

Value = dict[str, Any]


def command(request: LaunchRequest, options: KubernetesOptions, place: Sequence[str] = ()) -> list[str]:
    """What the container runs. In `place` the cluster replaces `$(NAME)`, in the user's words nothing."""
    user = [
        names.literal(f"word {number} of the command", word) for number, word in enumerate(request.command, 1)
    ]
    run = None if request.run is None else names.literal("--run", request.run)
    return [options.python, *words_of(user, notice=request.notice, run=run, place=place)]


def environment(request: LaunchRequest, options: KubernetesOptions) -> list[Value]:
    """The variables given by `--env`, in the manifest for all to read, and those that secrets hold."""
    given: list[Value] = [
        {"name": names.variable(name), "value": names.literal(f"--env {name}", value)}
        for name, value in request.environment
    ]
    given += [
        {"name": one.variable, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
        for one in options.secret
    ]
    seen = [one["name"] for one in given]
    if twice := next((name for name in seen if seen.count(name) > 1), None):
        raise UsageError(f"the variable {twice} is given twice: by --env or by --set secret, once")
    return given


def resources(options: KubernetesOptions) -> Value:
    """For one host. Devices and memory are never overcommitted, so they are limits, too."""
    limits: Value = {}
    if options.memory is not None:
        limits["memory"] = options.memory
    if options.gpus:
        limits[options.gpu_resource] = str(options.gpus)
    requests = {**({"cpu": options.cpu} if options.cpu is not None else {}), **limits}
    return {**({"requests": requests} if requests else {}), **({"limits": limits} if limits else {})}


def volumes(options: KubernetesOptions) -> tuple[list[Value], list[Value]]:
    """The volumes of a pod, and where they are mounted in its container."""
    made: list[Value] = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": one.claim}}
        for number, one in enumerate(options.pvc)
    ]
    mounts = [{"name": f"claim-{number}", "mountPath": one.path} for number, one in enumerate(options.pvc)]
    if options.shm is not None:
        made.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - the container's
    return made, mounts


def metadata(name: str, options: KubernetesOptions) -> Value:
    """Name, place and labels of an object of this launch."""
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "torchrelay"}
    if options.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    place = {} if options.namespace is None else {"namespace": options.namespace}
    return {"name": name, **place, "labels": labels}


def deadline(request: LaunchRequest) -> Value:
    """The pods are told `notice` before the end of the time limit, and have that long to save."""
    if request.time_limit is None:
        return {}
    if request.time_limit <= request.notice:
        raise UsageError(
            f"a time limit of {request.time_limit} s leaves nothing before the notice of {request.notice} s: "
            "give a longer limit or a shorter notice"
        )
    return {"activeDeadlineSeconds": request.time_limit - request.notice}


def given(**values: Any) -> Mapping[str, Any]:
    """Those that are anything: no empty lists, no None."""
    return {key: value for key, value in values.items() if value not in (None, [], {})}
