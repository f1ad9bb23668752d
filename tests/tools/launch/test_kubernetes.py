"""Manifests of a launch: valid by the published schemas, and true to what was asked for."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_schemas import check

from torchrelay.errors import UsageError
from torchrelay.tools.cli.main import main
from torchrelay.tools.launch.kubernetes import HOPELESS, files
from torchrelay.tools.launch.request import LaunchRequest, Layout

IMAGE = ("image", "reg.example/train:1")
PLAIN = LaunchRequest(Layout(2, 8), ("train.py", "--lr", "0.1"), Path("/src"), name="mnist", options=(IMAGE,))
FULL = replace(
    PLAIN,
    run="/runs/mnist",
    time_limit=3600,
    notice=120,
    restarts=3,
    environment=(("NCCL_DEBUG", "INFO"),),
    options=(
        IMAGE, ("namespace", "ml"), ("pvc", "runs:/runs"), ("pvc", "sets:/sets"), ("gpus", "8"),
        ("cpu", "500m"), ("memory", "64Gi"), ("shm", "8Gi"), ("secret", "HF_TOKEN:hub/token"),
        ("service_account", "trainer"), ("pull_secret", "reg"), ("queue", "team-a"), ("port", "29500"),
        ("workdir", "/app"), ("python", "python"),
    ),
)  # fmt: skip
TRAIN = replace(
    FULL,
    restarts=0,
    options=(
        *(one for one in FULL.options if one[0] != "workdir"),
        ("kind", "trainjob"),
        ("runtime", "torch-2"),
    ),
)


def documents(request: LaunchRequest) -> list[dict[str, Any]]:
    """The documents of the only file, as any reader of YAML has them."""
    (one,) = files(request)
    return list(yaml.safe_load_all(one.text))


def container(request: LaunchRequest) -> dict[str, Any]:
    """The container of the Job."""
    return documents(request)[1]["spec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "made_of", [PLAIN, FULL, TRAIN, replace(TRAIN, options=(IMAGE, ("kind", "trainjob")))]
)
def test_manifests_are_valid(made_of: LaunchRequest) -> None:
    """Service, Job and TrainJob pass the schemas of Kubernetes and of Kubeflow's trainer."""
    made = documents(made_of)
    assert [one["kind"] for one in made] in (["Service", "Job"], ["TrainJob"])
    for one in made:
        check(one)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("spec", "backofLimit"), 3),
        (("spec", "template", "spec", "subDomain"), "x"),
        (("spec", "template", "spec", "containers", 0, "resources", "limit"), {}),
        (("spec", "podFailurePolicy", "rules", 0, "action"), "Retry"),
        (("spec", "completions"), "2"),
    ],
)
def test_the_check_refuses_what_is_wrong(path: tuple[Any, ...], wrong: object) -> None:
    """A misspelled key at any depth, an unknown word and a text for a number are refused."""
    job = copy.deepcopy(documents(FULL)[1])
    check(job)
    inner: Any = job
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = wrong
    with pytest.raises((AssertionError, ValueError)):
        check(job)


def test_the_job_retries_what_can_go_on() -> None:
    """Preempted pods are replaced for nothing, hopeless ones end the job, others count, N per attempt."""
    spec = documents(FULL)[1]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 3 * 2 and documents(PLAIN)[1]["spec"]["backoffLimit"] == 0
    rules = {
        tuple(one["onExitCodes"]["values"]): one["action"] for one in spec["podFailurePolicy"]["rules"][:2]
    }
    assert rules == {(2, 3, 93): "FailJob", (75,): "Ignore"} and sorted(HOPELESS) == HOPELESS
    assert spec["podFailurePolicy"]["rules"][2]["onPodConditions"][0]["type"] == "DisruptionTarget"
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120 and spec["activeDeadlineSeconds"] == 3600 - 120
    assert pod["restartPolicy"] == "Never" and spec["podReplacementPolicy"] == "Failed"


def test_pods_meet_at_index_0_by_the_service() -> None:
    """The endpoint is the name that the headless Service gives to the pod of index 0, before it is ready."""
    service, job = documents(FULL)
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] == "mnist"
    words = pod["containers"][0]["command"]
    assert words[words.index("--endpoint") + 1] == "mnist-0.mnist:29500"
    assert words[words.index("--index") + 1] == "$(JOB_COMPLETION_INDEX)"


def test_volumes_secrets_and_resources_arrive() -> None:
    """Claims are mounted, values of secrets stay in the cluster, memory and devices are limits."""
    found = container(FULL)
    assert [one["mountPath"] for one in found["volumeMounts"]] == ["/runs", "/sets", "/dev/shm"]
    assert found["env"][1] == {"name": "NCCL_DEBUG", "value": "INFO"}
    assert found["env"][2]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert found["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert found["resources"]["requests"]["cpu"] == "500m" and found["workingDir"] == "/app"


HOSTILE = (
    'a\nb: c', "'\"\\", "$(rm -rf /)", "$$(X)", "${HOME}", "!!python/object:os.system", "&a *a", "# no",
    "---", "\u2028\x85\ufeff", "naïve \U0001f600", "", " ", "null", "1e3", "y", "0o17", "1:30", "x" * 5000,
    "--", "-",
)  # fmt: skip


@pytest.mark.parametrize("request_", [PLAIN, TRAIN])
def test_words_of_a_user_arrive_as_they_are(request_: LaunchRequest) -> None:
    """No word or value is taken for YAML, a shell's or a variable of Kubernetes (which halves `$$`)."""
    given = replace(
        request_,
        command=("train.py", *HOSTILE),
        environment=tuple((f"V{n}", t) for n, t in enumerate(HOSTILE)),
    )
    job = documents(given)[-1]
    check(job)
    found = job["spec"]["trainer"] if job["kind"] == "TrainJob" else container(given)
    words = found["command"]
    assert [_expanded(one) for one in words[words.index("--") + 1 :]] == list(given.command)
    values = {one["name"]: _expanded(one["value"]) for one in found["env"] if "value" in one}
    assert values == dict(given.environment)


def _expanded(text: str) -> str:
    """As Kubernetes does with commands and variables: `$$` is `$`; an unescaped `$(` would be looked up."""
    assert "$(" not in text.replace("$$", "")
    return text.replace("$$", "$")


def test_the_same_request_gives_the_same_text() -> None:
    """A manifest is stable, so that it can be kept under version control, and small at 10,000 hosts."""
    big = replace(FULL, layout=Layout(10_000, 8), restarts=1_000_000)
    assert files(FULL) == files(FULL)
    assert documents(big)[1]["spec"]["backoffLimit"] == (1 << 31) - 1
    assert len(files(big)[0].text) < 10_000


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(options=()), "--set image=NAME"),
        (dict(options=(IMAGE, ("imaeg", "x"))), "'imaeg' of Kubernetes"),
        (dict(options=(IMAGE, IMAGE)), "--set image is given twice"),
        (dict(options=(("image", "a b"),)), "expected an image"),
        (dict(options=(IMAGE, ("kind", "pytorchjob"))), "one of job, trainjob"),
        (dict(options=(IMAGE, ("pvc", "runs"))), "CLAIM:PATH"),
        (dict(options=(IMAGE, ("pvc", "a:/x"), ("pvc", "b:/x"))), "have the same path /x"),
        (dict(options=(IMAGE, ("pvc", "Runs:/x"))), "expected a Kubernetes name"),
        (dict(options=(IMAGE, ("pvc", "runs:x"))), "expected an absolute path"),
        (dict(options=(IMAGE, ("memory", "64 GB"))), "expected a quantity"),
        (dict(options=(IMAGE, ("memory", "0"))), "expected a quantity"),
        (dict(options=(IMAGE, ("gpus", "٣"))), "a whole number"),
        (dict(options=(IMAGE, ("port", "65536"))), "from 1 to 65535"),
        (dict(options=(IMAGE, ("namespace", "a.b"))), "expected 1 to 63"),
        (dict(options=(IMAGE, ("secret", "A:b"))), "VARIABLE:SECRET/ENTRY"),
        (dict(options=(IMAGE, ("gpu_resource", "a b"))), "expected a resource"),
        (dict(options=(IMAGE, ("queue", ""))), "expected 1 to 63"),
        (dict(name="MNIST"), "lowercase letters"),
        (dict(name="7days"), "beginning with a letter"),
        (dict(name="naïve"), "'na\\xefve'"),
        (dict(name="a\nb"), "'a\\nb'"),
        (dict(name="x" * 62), "at most 61 characters"),
        (dict(name="x" * 59, layout=Layout(10_000, 1)), "at most 58 characters"),
        (dict(layout=Layout(100_001, 1)), "at most 100000 pods"),
        (dict(time_limit=300), "is not longer than --notice"),
        (dict(environment=(("A B", "x"),)), "invalid variable name"),
        (dict(environment=(("A", "x"), ("A", "y"))), "A is given twice"),
        (dict(command=("train.py", "\udcff")), "is not valid UTF-8"),
        (dict(environment=(("A", "hidden\udcff"),)), "--env A"),
        (dict(options=(IMAGE, ("kind", "trainjob")), name="x" * 56), "at most 54 characters"),
        (dict(options=(IMAGE, ("kind", "trainjob")), restarts=1), "--max-restarts"),
        (dict(options=(IMAGE, ("kind", "trainjob")), command=("x",) * 200), "at most 128 arguments"),
        (
            dict(options=(IMAGE, ("kind", "trainjob")), environment=(("PET_NNODES", "1"),)),
            "reserved by Kubeflow Trainer",
        ),
        (dict(options=(IMAGE, ("kind", "trainjob"), ("workdir", "/x"))), "does not support --set workdir"),
    ],
)
def test_mistakes_are_one_line(change: dict[str, Any], told: str) -> None:
    """What a cluster would refuse, or take for something else, is refused before, on one printable line."""
    with pytest.raises(UsageError) as found:
        files(replace(PLAIN, **change))
    text = str(found.value)
    assert told in text and text.isprintable() and "hidden" not in text


def launched(*words: str) -> list[str]:
    """The words of a launch of one host."""
    return ["launch", "-j", "2", "--k8s", "--set", "image=x", *words, "--", "train.py"]


def test_without_kubectl_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without kubectl gets one line with the manifest's place, and code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(launched()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "kubectl is not on the PATH" in err
    assert (tmp_path / "launch/torchrelay.0/job.yaml").is_file()


def kubectl(folder: Path, script: str) -> None:
    """A program of that name which says what kubectl says."""
    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/words\n{script}\n')
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        (
            "echo service/torchrelay created; echo job.batch/torchrelay created",
            0,
            "kubectl logs -f job/torchrelay",
        ),
        ("echo 'error: no such host\nmore' >&2; exit 1", 2, "failed: error: no such host more"),
        (
            "echo service/torchrelay unchanged; echo job.batch/torchrelay unchanged",
            2,
            "already has this job",
        ),
    ],
)
def test_what_kubectl_says_is_told(
    script: str, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The written manifest is applied, no value is on a command line, a job that ran before is no start."""
    monkeypatch.chdir(tmp_path)
    kubectl(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(launched("--env", "KEY=hidden")) == code
    said = capsys.readouterr()
    assert told in said.out + said.err and "hidden" not in said.out + said.err
    words = (tmp_path / "words").read_text()
    assert words.endswith(f"-f {tmp_path}/launch/torchrelay.0/job.yaml\n") and "hidden" not in words
