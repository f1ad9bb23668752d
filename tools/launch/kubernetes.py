"""`launch --k8s`: a launch as manifests, which `kubectl apply` gives to a cluster.

What is retried follows from what `batch/v1` can tell apart: exit codes and disruptions, counted in pods. Pods
are made again one by one; those of an attempt that ended alike meet again at the pod of index 0.
Source: Kubernetes' API reference, batch/v1, of release 1.31, where policies for failed pods became stable.

Source: trainer.kubeflow.org/v1alpha1 of release 2.3, where `runtimePatches` replaced overrides of pods.

`--set kind=job` (the default) makes an indexed Job with its Service, `--set kind=trainjob` a TrainJob of
Kubeflow's trainer. The tests check the manifests against the schemas of both; no cluster was at hand.
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
    """What the container runs. In `place` the cluster replaces `$(NAME)`, in the user's words nothing."""
    user = [literal(f"word {number} of the command", word) for number, word in enumerate(request.command, 1)]
    run = None if request.run is None else literal("--run", request.run)
    return [options.python, *words_of(user, notice=request.notice, run=run, place=place)]


def environment(request: LaunchRequest, options: KubernetesOptions) -> list[Value]:
    """The variables given by `--env`, in the manifest for all to read, and those that secrets hold."""
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
    check_notice(request)
    return {"activeDeadlineSeconds": request.time_limit - request.notice}


def given(**values: Any) -> Mapping[str, Any]:
    """Those that are anything: no empty lists, no None."""
    return {key: value for key, value in values.items() if value not in (None, [], {})}


CONTAINER = "trainer"
HOPELESS = sorted(error.exit_code for error in (UsageError, NoProvableEpochError, NoProgressError))
"""Another attempt would end the same way."""
MOST_PODS, MOST_FAILURES = 100_000, (1 << 31) - 1
_UID = "TORCHRELAY_JOB_UID"


def job_documents(request: LaunchRequest, options: KubernetesOptions) -> list[Value]:
    """The Service and the Job, in this order; raises UsageError for what no cluster can run."""
    if request.layout.nodes > MOST_PODS:
        raise UsageError(f"-j {request.layout}: an indexed Job has at most {MOST_PODS} pods")
    name = job_name(request.name, f"-{request.layout.nodes - 1}")
    return [_service(name, options), _job(name, request, options)]


def _service(name: str, options: KubernetesOptions) -> Value:
    """Names for the pods, from the moment that they have an address: they meet before they are ready."""
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
    """The first that fits a failed pod counts; what none fits counts towards `backoffLimit`."""

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
    if options.service_account is not None:  # else training asks the cluster nothing, and gets no key to it
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
"""What the runtimes of the trainer call the job of the ranks, and the container in its pods."""
MOST_ENTRIES = 128
RESERVED = "PET_"
"""The trainer's own variables, by which torchrun learns its place."""


def trainjob_document(request: LaunchRequest, options: KubernetesOptions) -> Value:
    """The TrainJob; raises UsageError for what the trainer refuses or has no place for."""
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
            f"a TrainJob takes {MOST_ENTRIES} words and {MOST_ENTRIES} variables, these are {len(words)} and "
            f"{len(variables)}: put them into a file of the image, or take --set kind=job"
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
    """What a TrainJob has no field for: the pods of its runtime, patched."""
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
        raise UsageError(
            "--set workdir has no place in a TrainJob: set it in the image, or take --set kind=job"
        )
    if request.restarts:
        raise UsageError(
            "the runtime of a TrainJob decides how often it starts again: leave --max-restarts out, or take "
            "--set kind=job"
        )
    for name, _ in request.environment:
        if name.startswith(RESERVED):
            raise UsageError(f"the variable {shown(name)} is the trainer's own: leave it out")


SUBMIT_SECS = 120


def files(request: LaunchRequest) -> tuple[LaunchFile, ...]:
    """The one manifest of a request; raises UsageError for what a cluster would refuse. Pure.

    What `--env` gave stands in it as it is; values that nobody should read belong to `--set secret`.
    """
    options = options_of(request)
    if options.kind == "trainjob":
        made = [trainjob_document(request, options)]
    else:
        made = job_documents(request, options)
    text = documents(made, f"{request.layout}: {request.layout.ranks} ranks; made by torchrelay launch --k8s")
    return (LaunchFile(f"{options.kind}.yaml", text),)


def submit(request: LaunchRequest, directory: Path, output: Output) -> int:
    """Apply the manifest that lies in `directory`; returns when the cluster has it, not when it has run.

    Raises UsageError where there is no kubectl, or where it does not get through.
    """
    options = options_of(request)
    manifest = directory / f"{options.kind}.yaml"
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError(
            f"kubectl is not on the PATH: install it, or apply {manifest} from a machine that has it "
            "(--dry-run prints it)"
        )
    typed = [kubectl, "apply", f"--request-timeout={SUBMIT_SECS}s", "-f", str(manifest)]
    try:
        done = subprocess.run(  # noqa: S603 - the file that was shown
            typed, capture_output=True, text=True, timeout=2 * SUBMIT_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"kubectl took more than {2 * SUBMIT_SECS} s: is the cluster reachable?") from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"code {done.returncode}"
        raise UsageError(f"kubectl apply -f {manifest} failed: {reason:.500}")
    if any(
        line.endswith(" unchanged") and "job" in line.partition("/")[0] for line in done.stdout.splitlines()
    ):
        raise UsageError(
            f"the cluster has this very {options.kind} already, running or ended, and starts none: delete it "
            f"(kubectl delete -f {manifest}) or give another --name"
        )
    if output.json:
        output.value({"kind": options.kind, "name": request.name, "manifest": str(manifest)})
    else:
        output.line(done.stdout.rstrip())
        where = "" if options.namespace is None else f" -n {options.namespace}"
        what = "get trainjob " if options.kind == "trainjob" else "logs -f job/"
        output.line(f"watch it: kubectl{where} {what}{request.name}")
    return 0
