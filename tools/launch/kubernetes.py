"""`launch --k8s`: write a launch as manifests and submit them with `kubectl apply`.

- `--set kind=job` (the default): an indexed Job with its Service, batch/v1 as of Kubernetes 1.31, the first
  release with stable pod failure policies.
- `--set kind=trainjob`: a TrainJob, trainer.kubeflow.org/v1alpha1 as of release 2.3, which introduced
  `runtimePatches`.

Retries depend on exit codes and disruptions of single pods. Pods are recreated one by one and find each other
again at the pod with index 0. Tests check the manifests against both schemas, but not on a real cluster.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.errors import NoProgressError, NoProvableEpochError, PreemptedError, UsageError
from torchrelay.runners.monitoring.console import Output
from torchrelay.tools.launch.kubernetes_options import (
    KubernetesOptions,
    documents,
    job_name,
    literal,
    options_of,
    variable_name,
)
from torchrelay.tools.launch.on_host import words_of
from torchrelay.tools.launch.request import LaunchFile, LaunchRequest, check_notice, shown

Value = dict[str, Any]


def command(request: LaunchRequest, options: KubernetesOptions, place: Sequence[str] = ()) -> list[str]:
    """Return the container's command; the cluster expands `$(NAME)` only in `place`."""
    user = [literal(f"word {number} of the command", word) for number, word in enumerate(request.command, 1)]
    run = None if request.run is None else literal("--run", request.run)
    return [options.python, *words_of(user, notice=request.notice, run=run, place=place)]


def environment(request: LaunchRequest, options: KubernetesOptions) -> list[Value]:
    """Return the variables given by `--env` (in plain text) and by secrets."""
    given: list[Value] = [
        {"name": variable_name(name), "value": literal(f"--env {name}", value)}
        for name, value in request.environment
    ]
    given += [
        {"name": one.variable, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
        for one in options.secret
    ]
    seen = [one["name"] for one in given]
    if twice := next((name for name in seen if seen.count(name) > 1), None):
        raise UsageError(f"variable {twice} is given twice, by --env or --set secret")
    return given


def resources(options: KubernetesOptions) -> Value:
    """Return the resources of a host; devices and memory are also limits, to avoid overcommitment."""
    limits: Value = {}
    if options.memory is not None:
        limits["memory"] = options.memory
    if options.gpus:
        limits[options.gpu_resource] = str(options.gpus)
    requests = {**({"cpu": options.cpu} if options.cpu is not None else {}), **limits}
    return {**({"requests": requests} if requests else {}), **({"limits": limits} if limits else {})}


def volumes(options: KubernetesOptions) -> tuple[list[Value], list[Value]]:
    """Return the volumes of a pod and their mounts in its container."""
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
    """Return the name, namespace and labels of an object of this launch."""
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "torchrelay"}
    if options.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    place = {} if options.namespace is None else {"namespace": options.namespace}
    return {"name": name, **place, "labels": labels}


def deadline(request: LaunchRequest) -> Value:
    """Return the deadline: the pods get SIGTERM `notice` seconds before the time limit."""
    if request.time_limit is None:
        return {}
    check_notice(request)
    return {"activeDeadlineSeconds": request.time_limit - request.notice}


def given(**values: Any) -> Mapping[str, Any]:
    """Return the values that are not None or empty."""
    return {key: value for key, value in values.items() if value not in (None, [], {})}


CONTAINER = "trainer"
HOPELESS = sorted(error.exit_code for error in (UsageError, NoProvableEpochError, NoProgressError))
"""Exit codes for which another attempt would fail in the same way."""
MOST_PODS, MOST_FAILURES = 100_000, (1 << 31) - 1
_UID = "TORCHRELAY_JOB_UID"


def job_documents(request: LaunchRequest, options: KubernetesOptions) -> list[Value]:
    """Return the Service and the Job; raises UsageError for what no cluster can run."""
    if request.layout.nodes > MOST_PODS:
        raise UsageError(f"-j {request.layout}: an indexed Job has at most {MOST_PODS} pods")
    name = job_name(request.name, f"-{request.layout.nodes - 1}")
    return [_service(name, options), _job(name, request, options)]


def _service(name: str, options: KubernetesOptions) -> Value:
    """Return the Service that names the pods as soon as they have an address, before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": options.port, "protocol": "TCP"}],
        },
    }


def _job(name: str, request: LaunchRequest, options: KubernetesOptions) -> Value:
    nodes = request.layout.nodes
    labels = metadata(name, options)["labels"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(name, options),
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            **deadline(request),
            "backoffLimit": min(request.restarts * nodes, MOST_FAILURES),
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _rules()},
            "template": {"metadata": {"labels": labels}, "spec": _pod(name, request, options)},
        },
    }


def _rules() -> list[Value]:
    """Return the pod failure rules: the first match applies, others count towards `backoffLimit`."""

    def codes(*values: int) -> Value:
        return {"containerName": CONTAINER, "operator": "In", "values": list(values)}

    return [
        {"action": "FailJob", "onExitCodes": codes(*HOPELESS)},
        {"action": "Ignore", "onExitCodes": codes(PreemptedError.exit_code)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _pod(name: str, request: LaunchRequest, options: KubernetesOptions) -> Value:
    made, mounts = volumes(options)
    secrets = [] if options.pull_secret is None else [{"name": options.pull_secret}]
    account: Value = {"automountServiceAccountToken": False}
    if options.service_account is not None:  # by default training has no access to the cluster's API
        account = {"serviceAccountName": options.service_account}
    return {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.notice,
        **account,
        "enableServiceLinks": False,
        "containers": [_container(name, request, options, mounts)],
        **given(imagePullSecrets=secrets, volumes=made),
    }


def _container(name: str, request: LaunchRequest, options: KubernetesOptions, mounts: list[Value]) -> Value:
    place = [
        *("--layout", str(request.layout)),
        *("--index", "$(JOB_COMPLETION_INDEX)"),
        *("--endpoint", f"{name}-0.{name}:{options.port}"),
        *("--id", f"$({_UID})"),
    ]
    label = "metadata.labels['batch.kubernetes.io/controller-uid']"
    uid = {"name": _UID, "valueFrom": {"fieldRef": {"fieldPath": label}}}
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": command(request, options, place),
        **given(workingDir=options.workdir),
        "env": [uid, *environment(request, options)],
        "ports": [{"name": "rendezvous", "containerPort": options.port, "protocol": "TCP"}],
        **given(resources=resources(options), volumeMounts=mounts),
    }


MANAGER = "torchrelay.launch/launch"
STEP = NODE_CONTAINER = "node"
"""Names of the ranks' job and its container in the runtimes of Kubeflow Trainer."""
MOST_ENTRIES = 128
RESERVED = "PET_"
"""Prefix of the variables by which Kubeflow Trainer configures torchrun."""


def trainjob_document(request: LaunchRequest, options: KubernetesOptions) -> Value:
    """Return the TrainJob; raises UsageError for what Kubeflow Trainer does not support."""
    name = job_name(request.name, f"-{STEP}-0-{request.layout.nodes - 1}")
    _check(request, options)
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(name, options),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": options.runtime,
            },
            **deadline(request),
            "trainer": _trainer(request, options),
            "runtimePatches": [_patch(request, options)],
        },
    }


def _trainer(request: LaunchRequest, options: KubernetesOptions) -> Value:
    words = command(request, options)
    variables = environment(request, options)
    if max(len(words), len(variables)) > MOST_ENTRIES:
        raise UsageError(
            f"a TrainJob has at most {MOST_ENTRIES} arguments and {MOST_ENTRIES} variables, not {len(words)} "
            f"and {len(variables)}; use --set kind=job"
        )
    return {
        "image": options.image,
        "command": words,
        **given(env=variables),
        "numNodes": request.layout.nodes,
        "numProcPerNode": request.layout.per_node,
        **given(resourcesPerNode=resources(options)),
    }


def _patch(request: LaunchRequest, options: KubernetesOptions) -> Value:
    """Return the patch of the runtime's pods for settings that a TrainJob has no field for."""
    made, mounts = volumes(options)
    secrets = [] if options.pull_secret is None else [{"name": options.pull_secret}]
    pod = {
        "terminationGracePeriodSeconds": request.notice,
        **given(serviceAccountName=options.service_account, imagePullSecrets=secrets, volumes=made),
        **given(containers=[{"name": NODE_CONTAINER, "volumeMounts": mounts}] if mounts else []),
    }
    job = {"name": STEP, "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


def _check(request: LaunchRequest, options: KubernetesOptions) -> None:
    if options.workdir is not None:
        raise UsageError("a TrainJob does not support --set workdir; set the working directory in the image")
    if request.restarts:
        raise UsageError(
            "a TrainJob does not support --max-restarts (its runtime sets it); use --set kind=job"
        )
    for name, _ in request.environment:
        if name.startswith(RESERVED):
            raise UsageError(f"variable {shown(name)} is reserved by Kubeflow Trainer")


SUBMIT_SECS = 120


def files(request: LaunchRequest) -> tuple[LaunchFile, ...]:
    """Return the manifest of a request. Pure; raises UsageError for what a cluster would refuse.

    It contains the values of `--env` in plain text; use `--set secret` for secrets.
    """
    options = options_of(request)
    if options.kind == "trainjob":
        made = [trainjob_document(request, options)]
    else:
        made = job_documents(request, options)
    text = documents(made, f"{request.layout}: {request.layout.ranks} ranks; made by torchrelay launch --k8s")
    return (LaunchFile(f"{options.kind}.yaml", text),)


def submit(request: LaunchRequest, directory: Path, output: Output) -> int:
    """Apply the manifest in `directory`; returns once the cluster has accepted it.

    Raises UsageError if kubectl is missing or fails.
    """
    options = options_of(request)
    manifest = directory / f"{options.kind}.yaml"
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError(f"kubectl is not on the PATH: install it, or apply {manifest} on another machine")
    typed = [kubectl, "apply", f"--request-timeout={SUBMIT_SECS}s", "-f", str(manifest)]
    try:
        done = subprocess.run(  # noqa: S603 - the file that was shown
            typed, capture_output=True, text=True, timeout=2 * SUBMIT_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"kubectl did not finish within {2 * SUBMIT_SECS} s: check that the cluster is reachable"
        ) from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"code {done.returncode}"
        raise UsageError(f"kubectl apply -f {manifest} failed: {reason:.500}")
    if any(
        line.endswith(" unchanged") and "job" in line.partition("/")[0] for line in done.stdout.splitlines()
    ):
        raise UsageError(
            f"the cluster already has this {options.kind}, running or finished, so nothing was started; "
            f"delete it with kubectl delete -f {manifest}"
        )
    if output.json:
        output.value({"kind": options.kind, "name": request.name, "manifest": str(manifest)})
    else:
        output.line(done.stdout.rstrip())
        where = "" if options.namespace is None else f" -n {options.namespace}"
        what = "get trainjob " if options.kind == "trainjob" else "logs -f job/"
        output.line(f"to watch it: kubectl{where} {what}{request.name}")
    return 0
