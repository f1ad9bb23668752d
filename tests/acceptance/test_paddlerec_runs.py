"""PaddleRec's numbered statements on training and inference: PDR-9 to 13 and 15 to 18."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from lifecycle_cases import ROWS, run, written
from safetensors.torch import load_file

from torchrelay import open_checkpoint, save_blobs
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.jobs.config.config import load_config
from torchrelay.lifecycle import Network, StepContext, StepFailedError, run_config
from torchrelay.runners.config_runs.class_loading import Loader, load_classes
from torchrelay.runners.config_runs.selection import check_launch, device_of

BOTH = "runner.train1.phases=[a,b]"
SCOPES = """\
from torchrelay.lifecycle import Network as Base

class Network(Base):
    def build(self, context):
        super().build(context)
        for number, phase in enumerate(context.phases.values()):
            phase.scope["total"] = number
            assert set(phase.scope) >= {"total"} and phase.scope["total"] == number
"""


def epochs(folder: Path) -> list[int]:
    """The epochs that a run directory has."""
    found = run(folder, "runner.infer1.predictions_path=out/p.jsonl", mode=["infer1"])["infer1"]
    return [row["epoch"] for row in found]


def test_pdr_9_phases_run_in_order_in_each_epoch_each_in_its_own_scope(tmp_path, capfd):
    """PDR-9: both phases run in each epoch, in order, names of one do not meet the other's, all is saved."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(SCOPES)
    words = [BOTH, "runner.train1.network_class_path=mine.py", "runner.train1.print_interval=2"]
    done = run(tmp_path, *words)["train1"]
    assert re.findall(r"epoch (\d) (\w) step", capfd.readouterr().out) == [
        *(("1", name) for name in "ab"), *(("2", name) for name in "ab"),
    ]  # fmt: skip
    assert set(done.metrics) == {f"{phase}/{name}" for phase in "ab" for name in ("loss", "bias", "rmse")}
    saved = open_checkpoint(tmp_path / "run")
    assert (saved.value("a.total"), saved.value("b.total")) == (0, 1)
    assert {"a.model", "a.optimizer", "a.loader", "b.model", "b.optimizer", "b.loader"} <= set(saved.blobs)


def test_pdr_9_and_13_a_run_that_was_interrupted_goes_on_in_the_same_bits(tmp_path):
    """PDR-9, PDR-13: with two phases, two epochs and then two more are bit for bit four epochs."""
    run(tmp_path / "whole", BOTH, "runner.train1.epochs=4")
    run(tmp_path / "parts", BOTH, "runner.train1.epochs=2")
    run(tmp_path / "parts", BOTH, "runner.train1.epochs=4")
    whole, parts = (open_checkpoint(tmp_path / one / "run") for one in ("whole", "parts"))
    assert whole.epoch == parts.epoch == 4 and whole.facts.total_steps == 2 * 5 + 2 * 5
    tensors = whole.load_tensors("*")
    assert len(tensors) > 4
    assert all(
        torch.equal(one, parts.load_tensors(name)[name]) for name, one in tensors.items() if "rng" not in name
    )


@pytest.mark.parametrize(
    ("interval", "left"), [(None, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (-1, [0, 1, 2, 3, 4, 5])]
)
def test_pdr_10_an_interval_thins_what_stays_and_the_last_epoch_always_does(tmp_path, interval, left):
    """PDR-10: interval k leaves 0 (after init) and multiples of k, and the last; unset every epoch."""
    given = [] if interval is None else [f"runner.train1.save_checkpoint_interval={interval}"]
    run(tmp_path, "runner.train1.epochs=5", *given)
    assert epochs(tmp_path) == left


def test_pdr_10_saves_at_steps_are_distinct_and_no_epochs(tmp_path):
    """PDR-10: a save every 2 steps is a file of its own, read by warm starts, no epoch."""
    run(tmp_path, "runner.train1.save_step_interval=2", "runner.train1.save_step_path=steps")
    assert sorted(one.name for one in (tmp_path / "steps").iterdir()) == [
        "epoch_1_step_2.safetensors", "epoch_2_step_2.safetensors",
    ]  # fmt: skip
    assert epochs(tmp_path) == [0, 1, 2]
    words = [
        "runner.train1.save_checkpoint_path=next",
        "runner.train1.init_model_path=steps/epoch_2_step_2.safetensors",
    ]
    assert run(tmp_path, *words)["train1"] == 2


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("1", [1]),
        ("[3,1]", [1, 3]),
        ("1..2", [1, 2]),
        ("2..", [2, 3]),
        ("latest", [3]),
        ("all", [0, 1, 2, 3]),
    ],
)
def test_pdr_11_epochs_are_chosen_in_every_form(trained, choice, chosen):
    """PDR-11: one, a list, a range, latest, all: ascending, one row each, without `epochs` or save keys."""
    rows = run(trained, f"runner.infer1.epoch={choice}", mode=["infer1"])["infer1"]
    assert [row["epoch"] for row in rows] == chosen
    written_rows = [json.loads(line) for line in (trained / "out/metrics.jsonl").read_text().splitlines()]
    assert written_rows == rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs of one phase; the best one by `loss` is the last."""
    folder = tmp_path_factory.mktemp("trained")
    run(folder, "runner.train1.epochs=3", "runner.train1.keep_best={metric: loss, mode: max}")
    return folder


def test_pdr_11_metrics_are_those_of_the_epoch_alone_and_of_all_samples(trained):
    """PDR-11: metrics begin anew for each epoch, and are the means over all samples, of uneven steps too."""
    rows = run(trained, "runner.infer1.epoch=[1,3]", mode=["infer1"])["infer1"]
    data = [
        list(map(float, line.split()))
        for one in (1, 2)
        for line in (trained / f"data/{one}.txt").read_text().splitlines()
    ]
    x, y = torch.tensor(data)[:, :2], torch.tensor(data)[:, 2]
    for row in rows:
        weights = open_checkpoint(trained / "run", row["epoch"]).load_tensors("a.model")
        wrong = x @ weights["a.model.line.weight"][0] + weights["a.model.line.bias"] - y
        assert row["loss"] == pytest.approx(wrong.square().mean().item(), rel=1e-5)
        assert row["bias"] == pytest.approx(wrong.mean().item(), rel=1e-4, abs=1e-6)
        assert row["rmse"] == pytest.approx(wrong.square().mean().sqrt().item(), rel=1e-5)  # no mean of means
        assert row["samples"] == ROWS


def test_pdr_11_and_16_the_best_epoch_is_the_one_of_the_metric(trained):
    """PDR-11, PDR-16: `best` is the epoch that keep_best of the run means: the first, by the worst loss."""
    rows = run(trained, "runner.infer1.epoch=best", mode=["infer1"])["infer1"]
    assert [row["epoch"] for row in rows] == [open_checkpoint(trained / "run", "best").epoch] == [1]


def test_pdr_11_epochs_that_are_missing_are_named(trained, capfd):
    """PDR-11: a listed epoch that was never saved is an error naming it; of a range the rest is done."""
    with pytest.raises(StepFailedError, match=r"has no epoch 7, 9; it has 0 to 3") as caught:
        run(trained, "runner.infer1.epoch=[1,7,9]", mode=["infer1"])
    assert isinstance(caught.value.__cause__, UnknownEpochError) and caught.value.exit_code == 2
    rows = run(trained, "runner.infer1.epoch=3..5", mode=["infer1"])["infer1"]
    assert [row["epoch"] for row in rows] == [3]
    assert "has no epoch 4 to 5; it has 0 to 3" in capfd.readouterr().out


def test_pdr_12_predictions_stand_in_the_order_of_the_input(trained):
    """PDR-12: a line per epoch and sample, in order, as JSON lines; as CSV with the same numbers."""
    run(trained, "runner.infer1.epoch=[2,3]", mode=["infer1"])
    lines = [json.loads(line) for line in (trained / "out/predictions.jsonl").read_text().splitlines()]
    assert [(one["epoch"], one["index"]) for one in lines] == [(e, i) for e in (2, 3) for i in range(ROWS)]
    words = ["runner.infer1.epoch=[2,3]", "runner.infer1.predictions_path=out/p.txt"]
    run(trained, *words, "runner.infer1.predictions_format=csv", mode=["infer1"])
    with (trained / "out/p.txt").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["prediction"]) for row in table] == [one["prediction"] for one in lines]
    assert not list((trained / "out").glob("*.part"))


def test_pdr_12_predictions_go_to_a_url(trained):
    """PDR-12: any place that fsspec knows takes predictions and metrics."""
    import fsspec

    words = [
        "runner.infer1.predictions_path=memory://pdr12/p.csv",
        "runner.infer1.metrics_path=memory://pdr12/m.jsonl",
    ]
    run(trained, *words, "runner.infer1.epoch=latest", mode=["infer1"])
    system = fsspec.filesystem("memory")
    assert system.cat("/pdr12/p.csv").decode().splitlines()[0] == "epoch,index,prediction"
    assert json.loads(system.cat("/pdr12/m.jsonl"))["epoch"] == 3


def test_pdr_12_a_prediction_that_is_none_per_sample_is_refused(tmp_path):
    """PDR-12: what has no row per sample is a mistake with the remedy, not a wrong file."""
    written(tmp_path)
    model = tmp_path / "model.py"
    model.write_text(
        model.read_text() + "\n    def predict(self, outputs, batch):\n        return outputs.sum()\n"
    )
    run(tmp_path)
    with pytest.raises(StepFailedError, match=r"predictions of 4 samples must have one row per sample"):
        run(tmp_path, mode=["infer1"])


def test_pdr_13_init_model_path_is_a_warm_start_once(trained, tmp_path):
    """PDR-13: weights of another run are where epoch 0 starts; a resume does not take them again."""
    words = [f"runner.train1.init_model_path={trained / 'run'}", "runner.train1.epochs=1"]
    run(tmp_path, *words)
    first = open_checkpoint(tmp_path / "run", 0).load_tensors("a.model")
    assert all(
        torch.equal(one, first[name])
        for name, one in open_checkpoint(trained / "run").load_tensors("a.model").items()
    )
    before = open_checkpoint(tmp_path / "run", 1).load_tensors("a.model")
    assert run(tmp_path, *words[:1], "runner.train1.epochs=2")["train1"] == 2
    after = open_checkpoint(tmp_path / "run", 1).load_tensors("a.model")
    assert all(torch.equal(one, after[name]) for name, one in before.items())  # committed epochs stay


def test_pdr_13_the_optimizers_state_comes_along_if_asked_for(tmp_path):
    """PDR-13: with `init_optimizer` epoch 0 has the momentum of the other run, without it none."""
    words = ["+hyper_parameters.optimizer.momentum=0.9", "runner.train1.epochs=1"]
    run(tmp_path, *words)
    momentum = "a.optimizer.state.a.model.line.weight.momentum_buffer"
    old = open_checkpoint(tmp_path / "run").load_tensors(momentum)[momentum]
    words.append(f"runner.train1.init_model_path={tmp_path / 'run'}")
    for where, more in (("with", ["runner.train1.init_optimizer=true"]), ("without", [])):
        run(tmp_path, *words, *more, f"runner.train1.save_checkpoint_path={where}")
    first = open_checkpoint(tmp_path / "with", 0).load_tensors(momentum)
    assert torch.equal(first[momentum], old)
    assert not open_checkpoint(tmp_path / "without", 0).load_tensors(momentum, strict=False)


def test_pdr_13_weights_by_prefix_rename_and_strictness(tmp_path):
    """PDR-13: init_prefix and init_rename say which weights are meant; a misfit ends the profile."""
    weight, bias = torch.tensor([[5.0, 6.0]]), torch.tensor([7.0])
    stored = {"net.head.weight": weight, "net.head.bias": bias, "rest": torch.zeros(1)}
    save_blobs(tmp_path / "old.safetensors", stored)
    words = [f"runner.train1.init_model_path={tmp_path}/old.safetensors", "runner.train1.init_prefix=net"]
    run(tmp_path, *words, "runner.train1.init_rename={head: line}")
    assert torch.equal(
        open_checkpoint(tmp_path / "run", 0).load_tensors("a.model")["a.model.line.weight"], weight
    )
    with pytest.raises(StepFailedError, match=r"runner train1 failed in step loop"):
        run(tmp_path, *words, "runner.train1.save_checkpoint_path=run2")


def test_pdr_13_a_warm_start_without_strictness_says_what_it_takes_and_is_never_empty(tmp_path, capfd):
    """PDR-13: with `init_strict: false` misfits are skipped by name; taking none is an error."""
    save_blobs(
        tmp_path / "old.safetensors",
        {"net.line.weight": torch.ones(1, 9), "net.line.bias": torch.tensor([7.0]), "rest": torch.zeros(1)},
    )
    words = [f"runner.train1.init_model_path={tmp_path}/old.safetensors", "runner.train1.init_strict=false"]
    with pytest.warns(UserWarning, match=r"of another form: a\.model\.line\.weight"):
        run(tmp_path, *words, "runner.train1.init_prefix=net")
    assert open_checkpoint(tmp_path / "run", 0).load_tensors("a.model.line.bias")["a.model.line.bias"] == 7
    assert f"train1 a: warm start: 1 leaves of {tmp_path}/old.safetensors" in capfd.readouterr().out
    with pytest.raises(StepFailedError, match=r"nothing would be loaded"):
        run(tmp_path, *words, "runner.train1.init_prefix=rest", "runner.train1.save_checkpoint_path=run2")


def test_pdr_15_devices_are_chosen_or_refused_with_the_reason(tmp_path, monkeypatch):
    """PDR-15: cpu, or the GPU of the local rank; demands that cannot be met are refused before anything."""

    def device(*words: str, gpus: int, local_rank: int = 0) -> torch.device:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        keys = load_config(tmp_path / "config.yaml", words).settings.runner_named("train1")
        return device_of(keys, local_rank)

    written(tmp_path)
    auto, two = "runner.train1.device=auto", "runner.train1.selected_gpus=[3,1]"
    assert device(gpus=4) == device(auto, gpus=0) == torch.device("cpu")
    assert device(auto, gpus=4, local_rank=2) == torch.device("cuda", 2)
    assert device(auto, two, gpus=4, local_rank=1) == torch.device("cuda", 1)
    for words, gpus, local_rank, says in (
        (["runner.train1.device=gpu"], 0, 0, "this machine has no visible GPU"),
        ([auto, two], 0, 0, "this machine has no visible GPU"),
        ([auto, two], 2, 0, "selected_gpus has GPU 3, but this machine has 0 to 1"),
        ([auto, two], 4, 2, "may use 2 GPUs, but more processes were started"),
    ):
        with pytest.raises(UsageError, match=says):
            device(*words, gpus=gpus, local_rank=local_rank)


@pytest.mark.parametrize(
    ("words", "launched", "world", "says"),
    [
        (["class=cluster_train"], False, 1, "which needs a launcher"),
        (["class=local_cluster_train", "worker_num=2"], True, 4, "starts 2 processes itself"),
        (["selected_gpus=0"], False, 1, "contradict each other"),
    ],
)
def test_pdr_14_and_15_a_way_of_starting_that_contradicts_is_refused(tmp_path, words, launched, world, says):
    """PDR-14, PDR-15: class, launcher and device must go together; the message has the remedy."""
    written(tmp_path)
    given = [f"runner.train1.{word}" for word in words]
    keys = load_config(tmp_path / "config.yaml", given).settings.runner_named("train1")
    with pytest.raises(UsageError, match=says):
        check_launch(keys, launched=launched, world_size=world)


def test_pdr_10_models_for_inference_are_written_from_committed_epochs(tmp_path):
    """PDR-10: every k epochs, and of the last one, the model's own weights lie in a file per phase."""
    words = ["runner.train1.save_inference_interval=2", "runner.train1.save_inference_path=served"]
    run(tmp_path, *words, "runner.train1.epochs=3")
    assert sorted(one.name for one in (tmp_path / "served").iterdir()) == ["2", "3"]
    for epoch in (2, 3):
        exported = load_file(tmp_path / f"served/{epoch}/a.safetensors")
        stored = open_checkpoint(tmp_path / "run", epoch).load_tensors("a.model")
        assert set(exported) == {"line.weight", "line.bias"}
        assert all(torch.equal(one, stored[f"a.model.{name}"]) for name, one in exported.items())


def test_pdr_17_debug_tells_what_operators_and_data_cost(tmp_path, capfd):
    """PDR-17: `debug: true` prints once what operators cost in the first steps, and the share of the data."""
    run(tmp_path, "debug=true", "runner.train1.print_interval=2")
    lines = [line for line in capfd.readouterr().out.splitlines() if " debug " in line]
    head = r"train1 epoch 1 a debug 2 steps: operators [\d.]+ ms, data [\d.]+ % of the time"
    assert re.fullmatch(head, lines[0]) and 2 < len(lines) < 20
    assert any(re.search(r"aten::addmm: [\d.]+ ms, [\d.]+ %, 2 calls", line) for line in lines)


def test_pdr_16_an_early_stop_ends_the_run_and_keeps_the_best(tmp_path):
    """PDR-16: without a better value for `patience` epochs the run ends; the best epoch stays, as `best`."""
    words = [
        "runner.train1.epochs=9",
        "runner.train1.keep_last=1",
        "runner.train1.keep_best={metric: loss, mode: max}",
    ]
    early = "runner.train1.stop.early_stopping={metric: loss, mode: max, patience: 3}"
    done = run(tmp_path, *words, early)["train1"]
    assert done == 4 and "did not improve" in done.stop[0]
    assert epochs(tmp_path) == [1, 4] and open_checkpoint(tmp_path / "run", "best").epoch == 1


def test_pdr_17_lines_tell_times_rates_and_metrics_and_batches_are_dumped(tmp_path, capfd):
    """PDR-17: a line every print_interval steps has metrics, times and samples/s; a dump on demand."""
    run(tmp_path, "runner.train1.print_interval=1", "runner.train1.runner_result_dump_path=dump/rows.jsonl")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("train1 ")]
    form = r"train1 epoch \d a step \d: loss \S+, bias \S+, [\d.]+ ms/step, data [\d.]+ ms, \d+ samples/s"
    assert len(lines) == 6 and all(re.fullmatch(form, line) for line in lines)
    rows = [json.loads(line) for line in (tmp_path / "dump/rows.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["step"]) for row in rows] == [(e, s) for e in (1, 2) for s in (1, 2, 3)]
    assert f"loss {rows[0]['loss']:.6g}," in lines[0]


def test_pdr_18_samples_of_few_files_are_shared_by_any_number_of_ranks(tmp_path):
    """PDR-18: samples are shared, not files: two files serve three ranks, each sample once, always alike."""
    written(tmp_path)
    config = load_config(tmp_path / "config.yaml", ["phase.a.shuffle_filelist=true"])

    loader = Loader()
    classes = load_classes(config.settings, config.settings.runner[0], loader)
    loader.forget()
    context = StepContext(
        settings=config.settings, is_infer=False, classes=classes, runner=config.settings.runner[0]
    )

    def shares() -> list[list[int]]:
        found = []
        for rank in range(3):
            data = Network().build_loader(context, config.settings.phase[0], config.settings.dataset[0])
            found.append([i for batch in data.placed(rank, 3) for i in batch.indices.tolist()])
        return found

    first = shares()
    assert sorted(i for share in first for i in share) == list(range(ROWS)) and first == shares()
    assert first[0] != sorted(first[0])  # drawn


def test_pdr_13_a_finished_profile_is_not_run_again_and_job_options_reach_the_runner(tmp_path):
    """PDR-13: the same call again does nothing; `resume_from_epoch` of the caller rewinds."""
    run(tmp_path)
    before = (tmp_path / "run/checkpoints").stat().st_mtime_ns
    assert run(tmp_path)["train1"] == 2 and (tmp_path / "run/checkpoints").stat().st_mtime_ns == before
    config = load_config(tmp_path / "config.yaml", ["runner.train1.epochs=3"])
    assert run_config(config, job_options={"resume_from_epoch": 1})["train1"] == 3
    assert open_checkpoint(tmp_path / "run").branch == 1
