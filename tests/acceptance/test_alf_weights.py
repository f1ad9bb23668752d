"""Weights of upstream runs: which are taken, when, what is refused, where they lie (ALF-1, 7, 8, 11)."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from paired_sessions import paired_sessions
from stages import Net, filled, run_stage, values
from torch import nn

from torchrelay import InitFrom, Job, JobRunner, LocalSession, Upstream, max_epochs, open_checkpoint
from torchrelay.errors import BlobError, TaskFailedError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.training.extras.upstream import given_of, open_sources


class Crowd(nn.Module):
    """Parts whose names begin alike."""

    def __init__(self, shift: float = 0) -> None:
        super().__init__()
        self.encoder = nn.Module()
        for index, name in enumerate(("_sub1", "_sub10", "_sub1_b")):
            self.encoder.add_module(name, filled(nn.Linear(2, 2), index + shift))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An upstream run whose weights are 1 after epoch 1 and 2 after epoch 2."""
    folder = tmp_path_factory.mktemp("upstream")
    run_stage(folder / "a", {"model": filled(Net(), 0)})
    run_stage(folder / "crowd", {"agent": Crowd(shift=10)}, epochs=1, step=0)
    return folder


def test_alf_1_an_upstream_is_inside_of_the_run_that_was_built_on_it(runs: Path, tmp_path: Path) -> None:
    """With the upstream deleted the newest checkpoint has what the module last had, trained on or not."""
    upstream = shutil.copytree(runs / "a", tmp_path / "a")
    policy = filled(Net(), 50)
    run_stage(
        tmp_path / "b",
        {"policy": policy},
        upstream={"low": Upstream(upstream, keep="model")},
        init_from=[InitFrom("low", into="policy.encoder", prefix="model.encoder")],
    )
    shutil.rmtree(upstream)
    target = filled(Net(), 7)
    assert isinstance(target, Net)
    open_checkpoint(tmp_path / "b").load({"policy": target})
    assert torch.equal(target.encoder.weight, policy.encoder.weight)  # type: ignore[union-attr, arg-type]
    assert values(tmp_path / "b", "policy") == {
        **{f"policy.encoder.{name}": 4.0 for name in ("weight", "bias")},
        **{f"policy.head.{name}": 52.0 for name in ("weight", "bias")},
    }
    kept = open_checkpoint(tmp_path / "b").upstream["low"].load_tensors()
    assert {one.flatten()[0].item() for one in kept.values()} == {2.0}
    assert set(kept) == {
        f"model.{part}.{name}" for part in ("encoder", "head") for name in ("weight", "bias")
    }


def test_alf_1_a_run_trains_on_without_its_upstream(runs: Path, tmp_path: Path) -> None:
    """The same command, with an upstream that is gone, resumes with what was kept."""
    upstream = shutil.copytree(runs / "a", tmp_path / "a")
    options: dict[str, Any] = {"upstream": {"low": Upstream(upstream, keep="model.head")}, "init_from": "low"}
    run_stage(tmp_path / "b", {"model": filled(Net(), 50)}, epochs=1, **options)
    shutil.rmtree(upstream)
    result = run_stage(tmp_path / "b", {"model": filled(Net(), 70)}, epochs=3, **options)
    assert result == 3
    found = values(tmp_path / "b")
    assert found["model.head.bias"] == 5.0
    assert found["upstream.low.model.head.bias"] == 2.0
    assert "upstream.low.model.encoder.bias" not in found
    # Also a program that no longer names the upstream, and an epoch that was chosen by a user.
    assert run_stage(tmp_path / "b", {"model": filled(Net(), 70)}, epochs=4, resume_from_epoch=2) == 4
    assert values(tmp_path / "b")["upstream.low.model.head.bias"] == 2.0


def test_alf_7_a_warm_start_is_never_repeated(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that was killed resumes with its own weights, and says that it takes no others."""
    options: dict[str, Any] = {"upstream": {"low": runs / "a"}, "init_from": [InitFrom("low", "model")]}
    with pytest.raises(TaskFailedError, match="as planned"):
        run_stage(tmp_path / "b", {"model": filled(Net(), 50)}, epochs=4, crash_in=3, **options)
    assert values(tmp_path / "b")["model.encoder.bias"] == 4.0
    capfd.readouterr()
    result = run_stage(tmp_path / "b", {"model": filled(Net(), 50)}, epochs=4, **options)
    assert "init_from is not applied" in capfd.readouterr().err
    assert (int(result), result.warm_starts) == (4, ())
    assert values(tmp_path / "b")["model.encoder.bias"] == 6.0
    kinds = [event["kind"] for event in RunDirectory(tmp_path / "b").events()]
    assert (kinds.count("warm start"), kinds.count("upstream not read")) == (1, 1)


def test_alf_7_epoch_0_has_the_weights_that_were_taken(runs: Path, tmp_path: Path) -> None:
    """Taken after `init` and before epoch 0 is saved, on every node, of the epoch that was asked for."""
    job = Job("b", blobs={"model": lambda ctx: filled(Net(), 50)})
    job.init(lambda ctx: filled(ctx["model"], 60))
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    with LocalSession(["trainer_0", "trainer_1"]) as session:
        JobRunner(job, tmp_path / "b", upstream={"a": f"{runs}/a@1"}, init_from="a").train(session)
        assert [session.workspace(f"trainer_{n}")["model"].head.bias[0].item() for n in (0, 1)] == [1, 1]
    assert set(values(tmp_path / "b", "model", epoch=0).values()) == {1.0}
    assert open_checkpoint(tmp_path / "b").upstream["a"].epoch == 1


def test_alf_1_everything_may_be_kept(runs: Path, tmp_path: Path) -> None:
    """`keep="*"` takes all tensors but the random states, which are of no use to anybody else."""
    run_stage(tmp_path / "b", {"x": Net()}, epochs=1, upstream={"a": Upstream(runs / "a", keep="*")})
    assert open_checkpoint(tmp_path / "b").upstream["a"].blobs == ("model",)


def test_alf_7_other_upstreams_than_those_of_the_start_are_told(runs: Path, tmp_path: Path) -> None:
    """A run that resumes and is asked for another upstream goes on as it was begun, with a warning."""
    run_stage(tmp_path / "b", {"model": Net()}, epochs=1, upstream={"a": runs / "a"}, init_from="a")
    with pytest.warns(UserWarning, match=r"built on a=.*a; upstream=a=.*a@1 has no effect"):
        run_stage(tmp_path / "b", {"model": Net()}, upstream={"a": f"{runs}/a@1"}, init_from="a")


def test_alf_7_a_job_may_have_names_like_ours(tmp_path: Path) -> None:
    """A run without stages whose job has a value `lineage` of its own resumes as ever."""
    for epochs in (1, 2):
        assert run_stage(tmp_path / "a", {"model": Net(), "lineage": {"mine": 1}}, epochs=epochs) == epochs
    assert open_checkpoint(tmp_path / "a").value("lineage") == {"mine": 1}
    assert not open_checkpoint(tmp_path / "a").upstream


def test_alf_8_a_prefix_takes_its_subtree_and_no_other(runs: Path, tmp_path: Path) -> None:
    """`_sub1` never catches `_sub10`; what is taken may have other names here."""
    part = nn.Sequential(filled(nn.Linear(2, 2), 0))
    result = run_stage(
        tmp_path / "b",
        {"part": part, "one": filled(nn.Linear(2, 2), 0)},
        epochs=1,
        step=0,
        upstream={"crowd": runs / "crowd"},
        init_from=[
            InitFrom("crowd", into="part", prefix="agent.encoder", rename={"_sub10": "0"}, strict=False),
            InitFrom("crowd", into="one", prefix="agent.encoder._sub1"),
        ],
    )
    assert set(values(tmp_path / "b", "part").values()) == {11.0}
    assert set(values(tmp_path / "b", "one").values()) == {10.0}
    first, second = result.warm_starts
    assert set(first.unexpected) == {
        f"part.{sub}.{n}" for sub in ("_sub1", "_sub1_b") for n in ("weight", "bias")
    }
    assert (len(second.loaded), second.missing, second.unexpected, second.misshapen) == (2, (), (), ())


def test_alf_8_what_does_not_fit_is_refused_by_name(runs: Path, tmp_path: Path) -> None:
    """Missing, unexpected and misshapen leaves are listed, all of them; no object and no run has changed."""
    model = filled(Net(out=5), 50)
    model.more = nn.Linear(1, 1)  # type: ignore[assignment]
    del model.encoder
    with pytest.raises(BlobError) as refused:
        run_stage(tmp_path / "b", {"model": model}, upstream={"low": runs / "a"}, init_from="low")
    text = str(refused.value)
    for name in ("model.more.weight", "model.more.bias"):
        assert f"not in the checkpoint: {name}" in text
    for name in ("model.encoder.weight", "model.encoder.bias"):
        assert f"only in the checkpoint: {name}" in text
    assert "differs: model.head.weight is float32[5, 3] here, float32[2, 3]" in text
    assert "differs: model.head.bias" in text
    assert "strict=False" in text
    assert model.head.bias[0].item() == 50  # type: ignore[union-attr, index]
    with pytest.raises(Exception, match="nothing is committed"):
        open_checkpoint(tmp_path / "b")


def test_alf_8_without_strict_it_is_reported(runs: Path, tmp_path: Path) -> None:
    """What fits is taken; the result names what was missing, unexpected and misshapen."""
    model = filled(Net(out=5), 50)
    model.more = nn.Linear(1, 1)  # type: ignore[assignment]
    result = run_stage(
        tmp_path / "b",
        {"model": model},
        epochs=1,
        step=0,
        upstream={"low": runs / "a"},
        init_from=InitFrom("low", strict=False, rename={"model.encoder.bias": "model.encoder.shift"}),
    )
    (told,) = result.warm_starts
    assert told.loaded == ("model.encoder.weight",)
    assert set(told.missing) == {"model.encoder.bias", "model.more.weight", "model.more.bias"}
    assert told.unexpected == ("model.encoder.shift",)
    assert set(told.misshapen) == {"model.head.weight", "model.head.bias"}
    assert values(tmp_path / "b")["model.encoder.weight"] == 2.0
    assert values(tmp_path / "b")["model.head.bias"] == 50.0


@pytest.mark.parametrize(
    ("upstream", "init_from", "told"),
    [
        ({"low": "a"}, "lo", "did you mean 'low'"),
        ({"low": "nowhere"}, "low", "nowhere is not there"),
        ({"low": "a@9"}, "low", "epoch 9"),
        ({"lo.w": "a"}, (), "cannot be the alias"),
        ({"low": "a"}, InitFrom("low", into="modle"), "did you mean 'model'"),
        ({"low": "a"}, InitFrom("low", into="model.encodr"), "did you mean 'model.encoder'"),
        ({"low": "a"}, InitFrom("low", into="model", prefix="modle", strict=False), "did you mean 'model'"),
        ({"low": Upstream("a", keep="modle")}, (), "did you mean 'model'"),
        ({"low": Upstream("a", keep="trainer_0:rng.torch")}, (), "belongs to one node"),
        ({"lineage": "a"}, (), "is taken"),
        ({"low": Upstream("a", keep=3)}, (), "expected a name, a pattern"),  # type: ignore[arg-type]
        ({"low": ""}, (), "expected 'runs/expert@best'"),
        ("a", (), "invalid upstream='a'"),
    ],
)
def test_alf_8_slips_are_told_with_what_was_meant(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    upstream: dict[str, Any],
    init_from: Any,
    told: str,
) -> None:
    """Each wrong word ends the start with one error that names the nearest right one."""
    monkeypatch.chdir(runs)
    with pytest.raises(UsageError, match=told):
        run_stage(tmp_path / "b", {"model": Net()}, upstream=upstream, init_from=init_from)
    if not isinstance(init_from, InitFrom):
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prefix": "x"}, "pass into= as well"),
        ({"rename": "x"}, "new names by old ones"),
        ({"exclude": 3}, "expected a name, a pattern"),
        ({"into": "x", "include_optimizer": True}, "remove into="),
    ],
)
def test_alf_8_options_that_cannot_be_are_refused_at_once(options: dict[str, Any], told: str) -> None:
    """Where they are written, before any run is opened."""
    with pytest.raises(UsageError, match=told):
        InitFrom("a", **options)


def test_alf_8_ranks_that_build_on_different_runs_are_refused(runs: Path) -> None:
    """All ranks end with the same error, which names the rank; nobody waits for anybody."""
    given = [given_of({"a": f"{runs}/a@{epoch}"}, "a") for epoch in (1, 1, 2)]
    with ThreadPoolExecutor(3) as pool:
        peers = [session.peers for session in paired_sessions(3)]
        ended = [pool.submit(open_sources, *one) for one in zip(given, peers, strict=True)]
        for one in ended:
            with pytest.raises(UsageError, match="rank 2 has other upstream="):
                one.result(30)
        ended = [pool.submit(open_sources, given[0], one) for one in peers]
        assert [one.result(30)["a"].checkpoint.epoch for one in ended] == [1, 1, 1]


@pytest.mark.parametrize("include", [False, True])
def test_alf_11_states_of_optimizers_and_loaders_come_when_asked_for(tmp_path: Path, include: bool) -> None:
    """By default weights alone are taken; with the two options what else the upstream has by these names."""

    def train(where: Path, epochs: int, **options: Any) -> tuple[int, float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        job = Job("x", blobs={"model": model, "optimizer": optimizer, "scheduler": scheduler})

        @job.epoch
        def step(ctx: Any) -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()

        job.stop_when(max_epochs(epochs))
        JobRunner(job, where, **options).train(LocalSession())
        ckpt = open_checkpoint(where, epoch=0)
        moments = [leaf.name for leaf in ckpt.leaves if leaf.name.startswith("optimizer.state")]
        return len(moments), ckpt.value("scheduler")["last_epoch"]

    assert train(tmp_path / "a", 2) == (0, 0)
    both = InitFrom("a", include_optimizer=include, include_others=include)
    assert train(tmp_path / "b", 1, upstream={"a": tmp_path / "a"}, init_from=both) == (
        (2, 2) if include else (0, 0)
    )


def test_alf_11_given_names_are_left_out_and_defaults_stay(runs: Path, tmp_path: Path) -> None:
    """Excluded leaves keep the program's content, in warm starts and in plain loads; no option remembers."""
    excluded = ["model.head"]
    start = InitFrom("a", exclude=excluded)
    for name in ("b", "c"):
        result = run_stage(
            tmp_path / name,
            {"model": filled(Net(out=7), 50)},
            epochs=1,
            step=0,
            upstream={"a": runs / "a"},
            init_from=[start],
        )
        assert set(result.warm_starts[0].loaded) == {"model.encoder.weight", "model.encoder.bias"}
        assert values(tmp_path / name, "model")["model.head.bias"] == 50.0
    assert excluded == ["model.head"]
    target = filled(Net(), 50)
    told = open_checkpoint(runs / "a").load({"model": target}, exclude="*.bias")
    assert (len(told.loaded), told.missing) == (2, ())
    assert target.head.bias[0].item() == 50  # type: ignore[union-attr, index]
    assert target.head.weight[0, 0].item() == 2  # type: ignore[union-attr, index]
    assert not InitFrom("a").exclude and not InitFrom("a").rename
