"""`launch --k8s`: a launch as manifests, which `kubectl apply` gives to a cluster.

`--set kind=job` (the default) makes an indexed Job with its Service, `--set kind=trainjob` a TrainJob of
Kubeflow's trainer. The tests check the manifests against the schemas of both; no cluster was at hand.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.runners.launch.kubernetes_job import job_documents
from torchrelay.runners.launch.kubernetes_options import KubernetesOptions, options_of
from torchrelay.runners.launch.kubernetes_trainjob import trainjob_document
from torchrelay.runners.launch.request import LaunchFile, LaunchRequest
from torchrelay.runners.launch.yaml_documents import documents
from torchrelay.runners.monitoring.console import Output

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
        output.line(_what_now(request, options))
    return 0


def _what_now(request: LaunchRequest, options: KubernetesOptions) -> str:
    where = "" if options.namespace is None else f" -n {options.namespace}"
    if options.kind == "trainjob":
        return f"watch it: kubectl{where} get trainjob {request.name}"
    return f"watch it: kubectl{where} logs -f job/{request.name}"
