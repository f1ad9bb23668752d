"""`launch --k8s`: write a launch as manifests and submit them with `kubectl apply`.

- `--set kind=job` (the default): an indexed Job with its Service, batch/v1 as of Kubernetes 1.31, the first
  release with stable pod failure policies.
- `--set kind=trainjob`: a TrainJob, trainer.kubeflow.org/v1alpha1 as of release 2.3, which introduced
  `runtimePatches`.

Retries depend on exit codes and disruptions of single pods. Pods are recreated one by one and find each other
again at the pod with index 0. Tests check the manifests against both schemas, but not on a real cluster.

A string is written without quotes only if YAML 1.1 and 1.2 both read it as a string (not so `y`, `1e3` and
`0o17`); all others are quoted. Keys keep their order.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from torchrelay.errors import NoProgressError, NoProvableEpochError, PreemptedError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output
from torchrelay.tools.launch.on_host import words_of
from torchrelay.tools.launch.request import (
    LaunchFile,
    LaunchRequest,
    check_notice,
    form_of,
    read_options,
    shown,
)

Value = dict[str, Any]
LABEL = 63
"""Longest label of a host name (RFC 1123)."""
KINDS = ("job", "trainjob")
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
class KubernetesOptions:
    """Validated options; quantities have Kubernetes' form, such as `64Gi`, and are per host."""

    image: str
    kind: str = "job"
    namespace: str | None = None
    python: str = "python3"
    workdir: str | None = None
    pvc: tuple[tuple[str, str], ...] = ()
    """Names of persistent volume claims, with their mount paths in the container."""
    secret: tuple[tuple[str, str, str], ...] = ()
    """Names of environment variables, with the secret and the entry that hold their values."""
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str | None = None
    memory: str | None = None
    shm: str | None = None
    port: int = 29400
    service_account: str | None = None
    pull_secret: str | None = None
    runtime: str = "torch-distributed"
    queue: str | None = None
    """Kueue queue, which starts all pods of a job together."""


def options_of(request: LaunchRequest) -> KubernetesOptions:
    """Parse and check the `--set` options; raises UsageError with the key and the expected form."""
    read = read_options(request, _READ, "Kubernetes", ("pvc", "secret"))
    if "image" not in read:
        raise UsageError("image is missing: give --set image=NAME, an image with torchrelay and the program")
    found = KubernetesOptions(**read)
    paths = [path for _, path in found.pvc]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UsageError(f"--set pvc: two volumes have the same path {twice}")
    return found


_object_name = form_of(
    rf"{_LABEL}(\.{_LABEL})*", 253,
    ": expected a Kubernetes name of lowercase letters, digits, - and .",
)  # fmt: skip
_label_name = form_of(_LABEL, LABEL, f": expected 1 to {LABEL} lowercase letters, digits and -")
_path = form_of("/[^:]*", sys.maxsize, ": expected an absolute path in the container, such as /runs")
_entry = form_of("[-._A-Za-z0-9]+", 253, ": expected the name of an entry of a secret")
_quantity = form_of(
    r"(?=.*[1-9])[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTPE]|[KMGTPE]i)?", sys.maxsize,
    ": expected a quantity such as 4, 500m or 64Gi",
)  # fmt: skip


def _claim(key: str, text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not path:
        raise UsageError(f"--set {key}={shown(text)}: expected CLAIM:PATH such as runs:/runs")
    return _object_name(key, claim), _path(key, path)


def _secret(key: str, text: str) -> tuple[str, str, str]:
    variable, _, place = text.partition(":")
    secret, _, entry = place.partition("/")
    if not entry:
        raise UsageError(
            f"--set {key}={shown(text)}: expected VARIABLE:SECRET/ENTRY such as HF_TOKEN:hub/token"
        )
    return variable_name(variable), _object_name(key, secret), _entry(key, entry)


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
    "image": form_of("[!-~]+", 500, ": expected an image such as registry.example/train:1"),
    "kind": form_of("|".join(KINDS), LABEL, f": expected one of {', '.join(KINDS)}"),
    "namespace": _label_name,
    "python": _python,
    "workdir": _path,
    "pvc": _claim,
    "secret": _secret,
    "gpus": _whole(0, 1024),
    "gpu_resource": form_of(
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
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for variable, secret, key in options.secret
    ]
    seen = [one["name"] for one in given]
    if twice := next((name for name in seen if seen.count(name) > 1), None):
        raise UsageError(f"variable {twice} is given twice, by --env or --set secret")
    return given


def resources(options: KubernetesOptions) -> Value:
    """Return the resources of a host; devices and memory are also limits, to avoid overcommitment."""
    gpus = {options.gpu_resource: str(options.gpus)} if options.gpus else {}
    limits = {**given(memory=options.memory), **gpus}
    return dict(given(requests={**given(cpu=options.cpu), **limits}, limits=limits))


def volumes(options: KubernetesOptions) -> tuple[list[Value], list[Value]]:
    """Return the volumes of a pod and their mounts in its container."""
    made: list[Value] = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(options.pvc)
    ]
    mounts = [{"name": f"claim-{number}", "mountPath": path} for number, (_, path) in enumerate(options.pvc)]
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


def _pulls(options: KubernetesOptions) -> Value:
    return {} if options.pull_secret is None else {"imagePullSecrets": [{"name": options.pull_secret}]}


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
    service = {  # it names the pods as soon as they have an address, before they are ready
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
    rules = [  # the first match applies, other failures count towards `backoffLimit`
        {"action": "FailJob", "onExitCodes": _codes(*HOPELESS)},
        {"action": "Ignore", "onExitCodes": _codes(PreemptedError.exit_code)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    nodes = request.layout.nodes
    labels = metadata(name, options)["labels"]
    job = {
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
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": labels}, "spec": _pod(name, request, options)},
        },
    }
    return [service, job]


def _codes(*values: int) -> Value:
    return {"containerName": CONTAINER, "operator": "In", "values": list(values)}


def _pod(name: str, request: LaunchRequest, options: KubernetesOptions) -> Value:
    made, mounts = volumes(options)
    account: Value = {"automountServiceAccountToken": False}
    if options.service_account is not None:  # by default training has no access to the cluster's API
        account = {"serviceAccountName": options.service_account}
    place = [
        *("--layout", str(request.layout)),
        *("--index", "$(JOB_COMPLETION_INDEX)"),
        *("--endpoint", f"{name}-0.{name}:{options.port}"),
        *("--id", f"$({_UID})"),
    ]
    label = "metadata.labels['batch.kubernetes.io/controller-uid']"
    uid = {"name": _UID, "valueFrom": {"fieldRef": {"fieldPath": label}}}
    container = {
        "name": CONTAINER,
        "image": options.image,
        "command": command(request, options, place),
        **given(workingDir=options.workdir),
        "env": [uid, *environment(request, options)],
        "ports": [{"name": "rendezvous", "containerPort": options.port, "protocol": "TCP"}],
        **given(resources=resources(options), volumeMounts=mounts),
    }
    return {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.notice,
        **account,
        "enableServiceLinks": False,
        "containers": [container],
        **given(**_pulls(options), volumes=made),
    }


STEP = NODE_CONTAINER = "node"
"""Names of the ranks' job and its container in the runtimes of Kubeflow Trainer."""
MOST_ENTRIES = 128


def trainjob_document(request: LaunchRequest, options: KubernetesOptions) -> Value:
    """Return the TrainJob; raises UsageError for what Kubeflow Trainer does not support."""
    name = job_name(request.name, f"-{STEP}-0-{request.layout.nodes - 1}")
    if options.workdir is not None:
        raise UsageError("a TrainJob does not support --set workdir; set the working directory in the image")
    if request.restarts:
        raise UsageError(
            "a TrainJob does not support --max-restarts (its runtime sets it); use --set kind=job"
        )
    for variable, _ in request.environment:
        if variable.startswith("PET_"):  # Kubeflow Trainer configures torchrun by these
            raise UsageError(f"variable {shown(variable)} is reserved by Kubeflow Trainer")
    words, variables = command(request, options), environment(request, options)
    if max(len(words), len(variables)) > MOST_ENTRIES:
        raise UsageError(
            f"a TrainJob has at most {MOST_ENTRIES} arguments and {MOST_ENTRIES} variables, not {len(words)} "
            f"and {len(variables)}; use --set kind=job"
        )
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
            "trainer": {
                "image": options.image,
                "command": words,
                **given(env=variables),
                "numNodes": request.layout.nodes,
                "numProcPerNode": request.layout.per_node,
                **given(resourcesPerNode=resources(options)),
            },
            "runtimePatches": [_patch(request, options)],
        },
    }


def _patch(request: LaunchRequest, options: KubernetesOptions) -> Value:
    made, mounts = volumes(options)
    pod = {
        "terminationGracePeriodSeconds": request.notice,
        **given(serviceAccountName=options.service_account, **_pulls(options), volumes=made),
        **given(containers=[{"name": NODE_CONTAINER, "volumeMounts": mounts}] if mounts else []),
    }
    job = {"name": STEP, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "torchrelay.launch/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }


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
    text = yaml.dump_all(
        made, Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True, width=1 << 30
    )
    head = f"# {request.layout}: {request.layout.ranks} ranks; made by torchrelay launch --k8s\n"
    return (LaunchFile(f"{options.kind}.yaml", head + text),)


def submit(request: LaunchRequest, directory: Path, output: Output) -> int:
    """Apply the manifest in `directory`; returns once the cluster has accepted it. Raises UsageError."""
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
    if re.search(r"^[^/\n]*job[^/\n]*/.* unchanged$", done.stdout, re.MULTILINE):
        raise UsageError(
            f"the cluster already has this {options.kind}, running or finished, so nothing was started; "
            f"delete it with kubectl delete -f {manifest}"
        )
    where = "" if options.namespace is None else f" -n {options.namespace}"
    what = "get trainjob " if options.kind == "trainjob" else "logs -f job/"
    output.result(
        {"kind": options.kind, "name": request.name, "manifest": str(manifest)},
        [done.stdout.rstrip(), f"to watch it: kubectl{where} {what}{request.name}"],
    )
    return 0
