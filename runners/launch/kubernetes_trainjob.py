"""A launch as a TrainJob of Kubeflow's trainer: its runtime says how pods fail and meet, this what runs.

Source: trainer.kubeflow.org/v1alpha1 of release 2.3, where `runtimePatches` replaced overrides of pods.
"""

from __future__ import annotations

from torchrelay.errors import UsageError
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

MANAGER = "torchrelay.launch/launch"
STEP = CONTAINER = "node"
"""What the runtimes of the trainer call the job of the ranks, and the container in its pods."""
MOST_ENTRIES = 128
RESERVED = "PET_"
"""The trainer's own variables, by which torchrun learns its place."""


def trainjob_document(request: LaunchRequest, options: KubernetesOptions) -> Value:
    """The TrainJob; raises UsageError for what the trainer refuses or has no place for."""
    name = names.job_name(request.name, f"-{STEP}-0-{request.layout.nodes - 1}")
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
        **given(containers=[{"name": CONTAINER, "volumeMounts": mounts}] if mounts else []),
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
            raise UsageError(f"the variable {names.shown(name)} is the trainer's own: leave it out")
