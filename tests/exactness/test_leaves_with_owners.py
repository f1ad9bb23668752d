"""Nodes that own different leaves: the same nodes resume to the same bits, on others the policy decides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from owned_job import KINDS, run
from state_hash import sha256_of
from torchrun import REPOSITORY, torchrun

from torchrelay import Job, JobRunner, LocalSession, max_epochs, open_checkpoint
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.cluster import NodePlace

PROGRAM = REPOSITORY / "tests/programs/owned.py"
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"asynchronous": True},
    "scope later": {},
}
Told = dict[str, str]
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


def on_ranks(folder: Path, ranks: int, runs: list[tuple[Path, str, int, dict[str, Any]]]) -> list[list[Told]]:
    """What each rank told of each run."""
    plain = json.dumps([[str(path), *rest] for path, *rest in runs])
    env = {"PYTHONPATH": str(REPOSITORY / "tests/helpers")}
    done = torchrun(PROGRAM, plain, warm=True, ranks=ranks, cwd=folder, timeout_secs=200, env=env)
    assert done.rc == 0, str(done)
    return [
        [json.loads(Path(f"{path}.{number}.rank-{rank}.json").read_text()) for rank in range(ranks)]
        for number, (path, *_) in enumerate(runs)
    ]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Told]]]:
    """Runs on two ranks: whole ones of four epochs, and in each way one that is cut after two and resumed."""
    folder = tmp_path_factory.mktemp("owned")
    runs: list[tuple[str, tuple[Path, str, int, dict[str, Any]]]] = []
    for kind in KINDS:
        runs.append((f"{kind} whole", (folder / f"{kind} whole", kind, 4, {})))
        for name, how in HOWS.items():
            if name == "plain" or kind in ("stages", "experts", "average"):
                later = {**how, "scope": "rank"} if name == "scope later" else how
                runs.append((f"{kind} {name} cut", (folder / f"{kind} {name}", kind, 2, how)))
                runs.append((f"{kind} {name}", (folder / f"{kind} {name}", kind, 4, later)))
    told = on_ranks(folder, 2, [one for _, one in runs])
    return folder, {name: of_ranks for (name, _), of_ranks in zip(runs, told, strict=True)}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ranks_resume_to_equal_bits(
    story: tuple[Path, dict[str, list[Told]]], kind: str, how: str
) -> None:
    """Every rank ends as the run that was never cut, with no name of another rank in its workspace."""
    told = story[1]
    if f"{kind} {how}" in told:
        assert told[f"{kind} {how}"] == told[f"{kind} whole"]
        assert "error" not in told[f"{kind} whole"][0], told[f"{kind} whole"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_says_who_owns_what(story: tuple[Path, dict[str, list[Told]]], kind: str) -> None:
    """Each leaf is stored for its owners alone."""
    manifest = open_checkpoint(story[0] / f"{kind} whole").manifest
    owners = {leaf.name: sorted(manifest.owners_of(leaf)) for leaf in manifest.leaves if leaf.role != "rng"}
    expected = {
        "stages": {"model.layer0.weight": [0], "optimizer.state.model.layer1.weight.exp_avg": [1]},
        "experts": {"model.shared.weight": [0, 1], "model.expert1.seen": [1]},
        "named_stages": {"stage0.weight": [0], "stage1.weight": [1]},
        "average": {"ema.weight": [0], "best": [0], "model.weight": [0, 1]},
        "last_average": {"ema.weight": [1], "best": [1], "model.weight": [0, 1]},
        "sometimes": {"one": [0, 1], "one.tensor": [1]},
        "part_of_state": {"model.a.weight": [0, 1], "optimizer.state.model.a.weight.exp_avg": [0]},
        "zero_redundancy": {"model.0.weight": [0, 1]},
        "tally": {"counts": [0, 1], "seen": [0, 1]},
        "zero_scheduled": {"model.0.weight": [0, 1]},
        "zero_itself": {"optimizer.param_groups.1.lr": [0, 1], "optimizer.state.model.0.weight.step": [0]},
    }[kind]
    assert {name: owners[name] for name in expected} == expected


ELSEWHERE = [(kind, policy) for kind in KINDS for policy in (None, "by_rank", "drop")]


@pytest.fixture(scope="module")
def elsewhere(story: tuple[Path, dict[str, list[Told]]]) -> dict[tuple[int, str, str | None], list[Told]]:
    """The whole runs on three ranks, and on one, by each policy, without another epoch."""
    folder = story[0]
    found: dict[tuple[int, str, str | None], list[Told]] = {}
    runs = []
    for kind, policy in ELSEWHERE:
        copy = shutil.copytree(folder / f"{kind} whole", folder / f"{kind} {policy} on 3")
        runs.append((copy, kind, 5, {"reshard": policy}))
    for asked, told in zip(ELSEWHERE, on_ranks(folder, 3, runs), strict=True):
        found[(3, *asked)] = told
    return found


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("zero_redundancy", "zero_scheduled")]
)
def test_other_ranks_are_refused_without_a_policy(
    elsewhere: dict[tuple[int, str, str | None], list[Told]], kind: str
) -> None:
    """The refusal names blob, leaf, owners and reshard=; no object has changed."""
    for told in elsewhere[3, kind, None]:
        assert told["error"].startswith("UsageError"), told
        for text in ("reshard=", "belongs to trainer_", "now there are 3"):
            assert text in told["error"]
        assert told["untouched"] == "True"


FOLLOWERS = ("stages", "average", "last_average", "sometimes", "zero_itself")
FOLLOWING = [(kind, policy) for kind in FOLLOWERS for policy in ("by_rank", "drop")]


@pytest.mark.parametrize(("kind", "policy"), [*FOLLOWING, ("experts", "drop")])
def test_other_ranks_follow_the_policy(
    elsewhere: dict[tuple[int, str, str | None], list[Told]], kind: str, policy: str
) -> None:
    """With a policy the run goes on, on ranks that are new too; others get nothing of a blob of one rank."""
    found = elsewhere[3, kind, policy]
    assert ["error" in told for told in found] == [False] * 3
    if "average" in kind:
        kept = ["'ema'" in told["workspace"] for told in found]
        assert kept == ([True, False, False] if kind == "average" else [False, False, True])


@pytest.mark.parametrize("kind", ["stages", "named_stages", "experts", "average"])
def test_fewer_ranks_are_refused_without_a_policy(
    story: tuple[Path, dict[str, list[Told]]], kind: str
) -> None:
    """What an absent node owned is never dropped in silence, whoever registers the blob."""
    copy = shutil.copytree(story[0] / f"{kind} whole", story[0] / f"{kind} on 1")
    with LocalSession() as session:
        told = run(session, copy, kind, 5)
    assert "reshard=" in told["error"] and "now there are 1" in told["error"]


def test_what_init_made_stays_on_its_rank_where_another_registers_that_name(tmp_path: Path) -> None:
    """Three ranks, then four: the policy of rank 0 is for its own blob; `init` makes none of rank 1 again."""
    on_ranks(tmp_path, 3, [(tmp_path / "run", "noted", 1, {"reshard": "by_rank"})])
    told = on_ranks(tmp_path, 4, [(tmp_path / "run", "noted", 2, {"reshard": "by_rank"})])
    assert ["'note'" in of_rank["workspace"] for of_rank in told[0]] == [True, True, False, False]


def test_what_no_node_registers_any_more_can_be_left_out(story: tuple[Path, dict[str, list[Told]]]) -> None:
    """A stage of a node that is gone: the refusal names `resume_exclude`, with which the run goes on."""
    copy = shutil.copytree(story[0] / "named_stages whole", story[0] / "named_stages left out")
    with LocalSession() as session:
        told = run(session, copy, "named_stages", 5, reshard="by_rank")
        assert "resume_exclude=['optimizer1', 'stage1']" in told["error"]
        gone = ["optimizer1", "stage1"]
        told = run(session, copy, "named_stages", 5, reshard="by_rank", resume_exclude=gone)
    assert "error" not in told


def summed(values: dict[str, Any], place: NodePlace) -> Any:
    """What all nodes counted."""
    found = list(values.values())
    return sum(found) if torch.is_tensor(found[0]) else {"steps": sum(one["steps"] for one in found)}


@pytest.mark.parametrize("wrong", [None, "counts", "seen"])
def test_a_callable_changes_the_objects_that_the_program_holds(
    story: tuple[Path, dict[str, list[Told]]], wrong: str | None
) -> None:
    """A dict and a tensor become what it gives, in place; another type is refused before anything changes."""

    def policy(values: dict[str, Any], place: NodePlace) -> Any:
        kind = "seen" if torch.is_tensor(next(iter(values.values()))) else "counts"
        return [3] if kind == wrong else summed(values, place)

    copy = shutil.copytree(story[0] / "tally whole", story[0] / f"tally {wrong} on 1")
    with LocalSession() as session:
        told = run(session, copy, "tally", 5, reshard=policy)
    if wrong is not None:
        assert f"'{wrong}'" in told["error"] and "list" in told["error"] and told["untouched"] == "True"
    else:
        assert told["counts"] == sha256_of({"steps": 4 + 8 + 1})
        assert told["seen"] == sha256_of(torch.full((2,), 13.0))


def test_a_callable_that_raises_on_one_rank_ends_all_and_changes_nothing(
    story: tuple[Path, dict[str, list[Told]]],
) -> None:
    """Three ranks resume a run of two: all end with the words of the one, and none hangs."""
    copy = shutil.copytree(story[0] / "tally whole", story[0] / "tally raises on 3")
    told = [one[0] for one in on_ranks(story[0], 3, [(copy, "tally", 5, {"reshard": "raises on rank 1"})])]
    assert all("odd policy" in rank["error"] and rank["untouched"] == "True" for rank in told), told


def test_a_callable_is_not_asked_about_tensors_in_containers(tmp_path: Path) -> None:
    """It is refused by the name of the blob, for a container, which holds more than it can be asked about."""

    def start(epochs: int, nodes: int, **how: Any) -> None:
        job = Job("held", blobs={})
        job.blobs.add(held=lambda ctx: {"steps": 1, "sum": torch.ones(2)}, **how)
        job.epoch(lambda ctx: None)
        job.stop_when(max_epochs(epochs))
        with LocalSession([f"trainer_{n}" for n in range(nodes)]) as session:
            JobRunner(job, tmp_path / "run", best=None).train(session)

    start(1, 2, scope="rank")
    with pytest.raises(UsageError, match=r"blob 'held'.*tensors or dataclass instances inside; use one of"):
        start(2, 1, scope="rank", reshard=summed)


def test_parts_of_an_epoch_are_loaded_by_node(story: tuple[Path, dict[str, list[Told]]]) -> None:
    """`nodes=` takes what one node owns; without it a refusal says whose the leaves are."""
    ckpt = open_checkpoint(story[0] / "stages whole")
    model = torch_stage(1)
    with pytest.raises(BlobError, match="nodes='trainer_0'"):
        ckpt.load({"model": model})
    ckpt.load({"model": model}, nodes="trainer_1")
    stored = ckpt.load_tensors("model.*")
    assert model["layer1"].weight.equal(stored["model.layer1.weight"]) and len(stored) == 4
    with pytest.raises(UsageError, match=r"trainer_1:model\.layer1\.weight"):
        ckpt["trainer_0:model.layer1.weight"]


def torch_stage(rank: int) -> Any:
    """A stage as the job builds it."""
    return KINDS["stages"](rank)[0]["model"]
