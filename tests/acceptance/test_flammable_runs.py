"""Runs of programs in processes: killed ones, tests beside a training, several ranks, the example."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from paired_sessions import Meeting, PairedPeers
from program_cases import SMALL, Script, start
from torchrun import REPOSITORY, clean_environment, torchrun

import torchrelay
from torchrelay.errors import UsageError
from torchrelay.metadata.experiments import Identity
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.train import check_alike
from torchrelay.tools.cli.main import main

GATED = """def after_epoch(self, ctx):
        import pathlib, time
        while ctx.epoch == 2 and not pathlib.Path("go").exists():
            time.sleep(0.02)"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Script:
    return Script(tmp_path, capsys)


def until(true: Callable[[], bool], secs: float = 60) -> None:
    end = time.monotonic() + secs
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_flm_9_and_10_a_run_is_tested_while_it_trains_killed_and_continued(
    script: Script, tmp_path: Path
) -> None:
    """FLM-9, FLM-10: running, tested beside the training, killed, recognised, gone on with, finished."""
    script.more(GATED)
    assert script("test").rc == 2, "there is no run yet"
    training = start(script.path, "train", "--max-epochs", "3", cwd=tmp_path)
    try:
        until(lambda: any(run.joinpath("metrics.0.jsonl").exists() for run in script.runs))
        until(lambda: torchrelay.metric_rows(script.run, "train") != [])
        assert standing(script.run).word == "running"
        done = script("test")
        assert done.rc == 0 and "epoch 1 of" in done.out
        assert script("eval", str(_sample(tmp_path)), "out.json").rc == 0
        assert training.poll() is None
    finally:
        training.kill()
        training.communicate(timeout=100)
    stands = standing(script.run)
    assert (stands.word, stands.epoch) == ("interrupted", 1) and "killed" in stands.why
    (tmp_path / "go").touch()
    again = script("train", "--max-epochs", "3")
    assert again.rc == 0 and "continued" in again.out and "killed" in again.out
    assert standing(script.run).word == "finished", "its newest epoch has no result"
    assert script("test").rc == 0
    assert [row["epoch"] for row in torchrelay.metric_rows(script.run, "test")] == [1, 3]
    assert [row["epoch"] for row in torchrelay.metric_rows(script.run, "train")] == [1, 2, 3]
    assert standing(script.run).word == "tested"


def _sample(folder: Path) -> Path:
    (folder / "in.txt").write_text("1 2")
    return folder / "in.txt"


def test_flm_9_other_ends_are_states_too(script: Script) -> None:
    """FLM-9: failed by an error, interrupted by Ctrl-C or a time limit; an untrained run is a clear error."""
    script.more("def make_optimizer(self): raise ValueError('broken')")
    assert script("train").rc == 1
    assert script.runs == [], "what cannot be built leaves no run"
    script.path.write_text(SMALL)
    script.more("keep_last = 0")
    assert script("train").rc == 2
    created = script("test")
    assert created.rc == 2 and "no trained epoch yet" in created.err and "created" in created.err
    script.path.write_text(SMALL)
    script.more("def after_epoch(self, ctx):\n        if ctx.epoch == 2: raise ValueError('boom')")
    assert script("train").rc == 1
    failed = standing(script.runs[-1])
    assert failed.word == "failed" and "boom" in failed.why
    script.path.write_text(SMALL)
    script.more("def after_epoch(self, ctx):\n        if ctx.epoch == 1: raise KeyboardInterrupt")
    assert script("train").rc == 130
    newest = script.runs[-1]
    assert standing(newest).word == "interrupted"
    untrained = script("test")
    assert untrained.rc == 2 and "no trained epoch yet" in untrained.err and "Ctrl-C" in untrained.err
    script.path.write_text(SMALL)
    script.more("def after_epoch(self, ctx):\n        import os, signal\n"
                "        if ctx.epoch == 1: os.kill(os.getpid(), signal.SIGTERM)")  # fmt: skip
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    try:
        assert script("train").rc == 75
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])
    newest = script.runs[-1]
    assert "preempted" in standing(newest).why
    count = len(script.runs)
    assert script("train").rc == 0 and len(script.runs) == count


@pytest.mark.timeout(300)
def test_flm_13_and_15_one_run_on_all_ranks_which_a_restart_goes_on_with(tmp_path: Path) -> None:
    """FLM-13, FLM-15: --force makes one run although a rank dies; values of all ranks count."""
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "line.py"
    more = """    reductions = {"seen": "all", "train/most": max, "val/most": "max"}

    def iteration(self, batch):
        found = super().iteration(batch)
        return {**found, "seen": batch.indices.float(), "most": batch.indices.max().float()}

    def after_epoch(self, ctx):
        import os
        if ctx.epoch == 2 and ctx.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)

"""
    path.write_text(SMALL.replace("    # more\n", more))
    done = torchrun(path, "train", "--force", warm=True, ranks=2, cwd=tmp_path, max_restarts=1)
    assert done.rc == 0, str(done)
    (run,) = (tmp_path / "runs" / "line").iterdir()
    assert "the run of this launch" in done.out
    rows = torchrelay.metric_rows(run, "train")
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        assert sorted(row["seen"]) == [float(i) for i in range(16)], "every sample of both ranks, once"
        assert row["most"] == 15.0
    assert torchrelay.metric_rows(run, "val")[1].keys() == {"epoch", "loss"}
    _check_packaged(run, path, tmp_path)


def _check_packaged(run: Path, script: Path, folder: Path) -> None:
    """SNG-14, SNG-15: what two ranks trained runs from its package, where the code is not."""
    out = folder / "deployed" / "line.pkg"
    assert main(["package", f"{run}@2", "--out", str(out)]) == 0
    (weights,) = [torchrelay.open_checkpoint(run).load_tensors("model.*")]
    x = torch.arange(10.0).reshape(5, 2)
    there = torch.nn.functional.linear(x, weights["model.weight"], weights["model.bias"])
    script.unlink()
    package = torchrelay.open_package(out)
    assert package.metadata["epoch"] == 2
    assert package.metadata["run"] == run.name
    code = (
        "import sys, torchrelay; model = torchrelay.load(sys.argv[1]); import torch\n"
        "print(model(torch.arange(10.0).reshape(5, 2)).tolist())"
    )
    words = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(
        words, cwd=out.parent, env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.tensor(ast.literal_eval(done.stdout)), there)


def test_flm_13_ranks_of_other_code_or_configuration_are_named() -> None:
    """FLM-13: ranks whose code or configuration is not rank 0's are listed, on all ranks, as a mistake."""
    meeting = Meeting(3)
    own = [Identity("a", None), Identity("b", None), Identity("b", "c")]

    def refusal(rank: int) -> str:
        with pytest.raises(UsageError) as caught:
            check_alike(own[rank], PairedPeers(rank, 3, meeting))
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        (told,) = set(pool.map(refusal, range(3)))
    assert "rank 1 has other code; rank 2 has other code and another configuration than rank 0" in told


def test_flm_14_every_step_can_be_overridden_alone(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FLM-14: each step is called, by its name, in its verb; overriding one leaves the others as they are."""
    called: set[str] = set()
    monkeypatch.syspath_prepend(str(script.path.parent))
    monkeypatch.delitem(sys.modules, "line", raising=False)
    import line  # type: ignore[import-not-found]

    names = ("make_data", "make_model", "make_criterion", "make_optimizer", "make_scheduler", "make_loader",
             "prepare", "forward", "loss", "backward", "iteration", "epoch", "validate", "after_epoch",
             "single_test", "measure", "test_on", "load_sample", "prepare_sample", "postprocess",
             "store_result", "more_state", "stop_conditions", "runner_options")  # fmt: skip

    def noting(name: str) -> Callable[..., object]:
        inner = getattr(line.Line, name)

        def step(self: object, *values: object, **named: object) -> object:
            called.add(name)
            return inner(self, *values, **named)

        return step

    program = type("Noted", (line.Line,), {name: noting(name) for name in names})()
    program.train()
    program.test()
    program.store_result(program.eval(_sample(tmp_path)), tmp_path / "out.json")
    assert called == set(names)
    only = type("Only", (line.Line,), {"iteration": lambda self, batch: {"n": len(batch[0])}})()
    weights = only.model.state_dict()["weight"].clone()
    only.train()
    assert torch.equal(only.model.state_dict()["weight"], weights)
    assert only.rows("train")[0]["n"] == 8


def test_flm_15_streams_and_reductions(script: Script) -> None:
    """FLM-15: mean, last, all and callables, by name and stream; rows with epochs; a torn line is no row."""
    script.more("reductions = {'score': 'all', 'val/score': sum, 'end': 'last', 'test/score': 'max'}")
    script.more(
        "def measure(self, o, t): return {'score': t.flatten(), 'end': t[-1]}\n"
        "    def iteration(self, batch): return {**super().iteration(batch), 'score': batch.indices}"
    )
    script.more("def single_test(self, batch):\n        found = super().single_test(batch)\n"
                "        return {**found, 'score': found['score'].max()}")  # fmt: skip
    assert script("train").rc == 0
    assert script("test").rc == 0
    train = torchrelay.metric_rows(script.run, "train")
    assert [sorted(row["score"]) for row in train] == [list(map(float, range(16)))] * 2
    assert train[0]["score"] != train[1]["score"], "in the order of the steps"
    (first, second) = torchrelay.metric_rows(script.run, "val")
    assert (first["epoch"], second["epoch"], first["score"]) == (1, 2, pytest.approx(14 / 32))
    (tested,) = torchrelay.metric_rows(script.run, "test")
    assert tested["score"] == pytest.approx(30 / 32) and tested["end"] == pytest.approx(30 / 32)
    with (script.run / "values.jsonl").open("a") as file:
        file.write('{"epoch": 1, "stream": "train", "values": {"score": [')
    assert torchrelay.metric_rows(script.run, "train") == train
    with pytest.raises(torchrelay.RelayError):
        torchrelay.metric_rows(script.directory / "no", "train")


def test_flm_15_values_survive_a_stop_in_the_middle_of_an_epoch(script: Script) -> None:
    """FLM-15: an epoch that is gone on with in its middle has the values of its beginning, too."""
    script.more("reductions = {'seen': 'all'}\n    batch_size = 2")
    script.more(
        "def iteration(self, batch):\n        import os, pathlib, signal\n"
        "        self.steps = getattr(self, 'steps', 0) + 1\n"
        "        if self.steps == 11 and not pathlib.Path('went').exists():\n"
        "            pathlib.Path('went').touch(); os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return {**super().iteration(batch), 'seen': batch.indices}"
    )
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    try:
        assert script("train").rc == 75
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])
    assert script("train").rc == 0
    for row in torchrelay.metric_rows(script.run, "train"):
        assert sorted(row["seen"]) == list(map(float, range(16)))


def test_flm_17_periodic_functions_and_the_best_epoch(script: Script) -> None:
    """FLM-17: every_n_epochs, validation every so many epochs, and the best epoch stays whatever is kept."""
    script.more("validate_every, keep_last, best = 2, 1, ('val/rank', 'max')")
    script.more("def __init__(self): self.every_n_epochs(3, lambda ctx: print('third', ctx.epoch))")
    script.more("def measure(self, o, t): return {'rank': float(self.now == 2)}")
    script.more("def validate(self, ctx): self.now = ctx.epoch; super().validate(ctx)")
    done = script("train", "--max-epochs", "6")
    assert done.rc == 0, done.err
    assert [line for line in done.out.splitlines() if line.startswith("third")] == ["third 3", "third 6"]
    assert [row["epoch"] for row in torchrelay.metric_rows(script.run, "val")] == [2, 4, 6]
    assert torchrelay.open_checkpoint(script.run, "best").epoch == 2
    with pytest.raises(torchrelay.RelayError):
        torchrelay.open_checkpoint(script.run, 4)


def test_flm_14_the_example_has_all_verbs_in_25_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLM-14: examples/classifier.py, 25 lines, gets train, test, eval, status and amend."""
    text = (REPOSITORY / "examples" / "classifier.py").read_text()
    assert len(text.splitlines()) <= 25
    script = Script(tmp_path, capsys, text)
    assert script("train", "--max-epochs", "2").rc == 0
    (run,) = (script.path.parent / "runs" / "line").iterdir()
    assert script("train", "--max-epochs", "3").rc == 0
    assert "continued" not in script("train", "--max-epochs", "3").out
    tested = script("test", "--epoch", "best")
    assert tested.rc == 0 and "accuracy" in tested.out
    assert torchrelay.metric_rows(run, "test")[0]["accuracy"] > 0.5
    from sklearn.datasets import load_digits

    scan = load_digits().images[1700] / 16
    (tmp_path / "digit.txt").write_text("\n".join(" ".join(map(str, row)) for row in scan))
    assert script("eval", "digit.txt", "digit.json").rc == 0
    assert json.loads((tmp_path / "digit.json").read_text()) in range(10)
    assert "max_epochs raised" in script("status").out, "the class says more epochs than were typed"
    assert script("train").rc == 0
    assert script("status", "--check").rc == 0
    script.path.write_text(text + "# a comment\n")
    assert script("status", "--check").rc == 1
    assert script("amend").rc == 0
    assert script("status", "--check").rc == 0
