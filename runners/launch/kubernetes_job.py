"""A launch as an indexed Job and the headless Service by which its pods find each other.

What is retried follows from what `batch/v1` can tell apart: exit codes and disruptions, counted in pods. Pods
are made again one by one; those of an attempt that ended alike meet again at the pod of index 0.
Source: Kubernetes' API reference, batch/v1, of release 1.31, where policies for failed pods became stable.
"""

from __future__ import annotations

from torchrelay.errors import NoProgressError, NoProvableEpochError, PreemptedError, UsageError
from torchrelay.runners.launch import kubernetes_names as names
from torchrelay.runners.launch.kubernetes_options import KubernetesOptions
from torchrelay.runners.launch.kubernetes_pod import (
    Value,
    command,
    deadline,
    environment,
    given,
    metadata,
    resources,
    volumes,
)
from torchrelay.runners.launch.request import LaunchRequest

CONTAINER = "trainer"
HOPELESS = sorted(error.exit_code for error in (UsageError, NoProvableEpochError, NoProgressError))
"""Another attempt would end the same way."""
MOST_PODS, MOST_FAILURES = 100_000, (1 << 31) - 1
_UID = "TORCHRELAY_JOB_UID"


def job_documents(request: LaunchRequest, options: KubernetesOptions) -> list[Value]:
    """The Service and the Job, in this order; raises UsageError for what no cluster can run."""
    if request.layout.nodes > MOST_PODS:
        raise UsageError(f"-j {request.layout}: an indexed Job has at most {MOST_PODS} pods")
    name = names.job_name(request.name, f"-{request.layout.nodes - 1}")
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
    return {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.notice,
        **_account(options),
        "enableServiceLinks": False,
        "containers": [_container(name, request, options, mounts)],
        **given(imagePullSecrets=secrets, volumes=made),
    }


def _account(options: KubernetesOptions) -> Value:
    """Training asks the cluster nothing: it gets a key to it only where an account is named."""
    if options.service_account is None:
        return {"automountServiceAccountToken": False}
    return {"serviceAccountName": options.service_account}


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
