"""PaddleRec's numbered statements on data that grow, and on keys that nobody reads: PDR-19, PDR-6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lifecycle_cases import run, written

from torchrelay import open_checkpoint
from torchrelay.jobs.config.config import load_config
from torchrelay.jobs.session import Solo
from torchrelay.lifecycle import StepFailedError, run_config
from torchrelay.runners.config_runs.user_objects import GrowingLoader, PartitionsOver, partitions_there

TWO_EPOCHS_EACH = ("runner.train1.epochs=null", "runner.train1.epochs_per_partition=2")


def day(folder: Path, name: str, samples: int) -> None:
    (folder / "data" / name).write_text("".join(f"{at} 1 {at}\n" for at in range(samples)))


def known(folder: Path, epoch: int | str = "last") -> dict[str, Any]:
    """What the loader of an epoch stood at."""
    found: dict[str, Any] = open_checkpoint(folder / "run", epoch).value("a.loader")
    return found


def test_pdr_19_each_partition_is_trained_so_often_and_new_ones_come_behind(tmp_path):
    """PDR-19: k epochs per partition; the run ends with the data and goes on when started with more."""
    written(tmp_path)
    done = run(tmp_path, *TWO_EPOCHS_EACH)["train1"]
    assert done == 4 and done.stop[0].startswith("no partition of the data is left after 4 epochs")
    assert run(tmp_path, *TWO_EPOCHS_EACH)["train1"] == 4  # nothing came
    day(tmp_path, "3.txt", 5)
    (tmp_path / "data/1.txt").unlink()  # what is done may go
    assert run(tmp_path, *TWO_EPOCHS_EACH)["train1"] == 6
    day(tmp_path, "0.txt", 3)  # behind those that are known, whatever its name
    assert run(tmp_path, *TWO_EPOCHS_EACH)["train1"] == 8
    assert [known(tmp_path, epoch)["length"] for epoch in (1, 2, 3, 4, 5, 6, 7, 8)] == [
        7,
        7,
        4,
        4,
        5,
        5,
        3,
        3,
    ]
    names = [one[0] for one in known(tmp_path)["known"]]
    assert names == ["data/1.txt", "data/2.txt", "data/3.txt", "data/0.txt"]


def test_pdr_19_data_that_grow_are_looked_up_before_each_epoch(tmp_path):
    """PDR-19: with `grows` an epoch is over all files there are when it begins, new ones last."""
    written(tmp_path)
    run(tmp_path, "dataset.d.grows=true", "runner.train1.epochs=1")
    day(tmp_path, "0.txt", 3)
    run(tmp_path, "dataset.d.grows=true", "runner.train1.epochs=2")
    assert [known(tmp_path, epoch)["length"] for epoch in (1, 2)] == [11, 14]


def loader(folder: Path, **more: Any) -> GrowingLoader:
    """Samples are lines of files."""

    def read(files: Any) -> list[str]:
        return [line for one in files for line in (folder / one).read_text().split()]

    there = lambda: partitions_there([str(folder / "days")], folder)  # noqa: E731
    return GrowingLoader(there, read, 2, seed=1, collate=list, **more)


def taken(source: GrowingLoader, steps: int | None = None) -> list[str]:
    found: list[str] = []
    for at, batch in enumerate(source):
        found += batch.data
        if at + 1 == steps:
            break
    return found


def test_pdr_19_an_epoch_that_was_left_goes_on_over_the_files_it_began_with(tmp_path):
    """PDR-19: the position has the files of the running epoch; what came meanwhile waits for the next one."""
    for name, lines in (("days/a/1.txt", "p q r"), ("days/a/2.txt", "s t"), ("days/b.txt", "u v")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(lines)
    first = loader(tmp_path)
    first.look(Solo())
    begun = taken(first, steps=1)
    state = first.state_dict()
    (tmp_path / "days/0.txt").write_text("w x")
    second = loader(tmp_path)
    second.load_state_dict(state)
    second.look(Solo())
    assert sorted(begun + taken(second)) == list("pqrstuv")
    second.look(Solo())
    assert sorted(taken(second)) == list("pqrstuvwx")

    daily = loader(tmp_path, per_partition=1)
    daily.look(Solo())
    assert (daily.next_epochs(), sorted(taken(daily))) == (3, list("wx"))
    daily.look(Solo())
    assert sorted(taken(daily)) == list("pqrst")  # a directory is one partition
    assert PartitionsOver("data", daily, 3).ask(type("At", (), {"epoch": 3})).stop


def test_pdr_19_a_run_over_growing_data_is_left_in_an_epoch_and_goes_on_in_the_same_bits(tmp_path):
    """PDR-19: preempted inside of a partition, continued behind a new one, it is what it would have been."""
    weights = []
    for name in ("whole", "parts"):
        folder = tmp_path / name
        folder.mkdir()
        written(folder)
        (folder / "mine.py").write_text(LEAVING.format(leaves=name == "parts"))
        words = [*TWO_EPOCHS_EACH, "runner.train1.network_class_path=mine.py"]
        if name == "parts":
            assert run(folder, *words)["train1"].status == "PREEMPTED"
        day(folder, "3.txt", 5)
        assert run(folder, *words)["train1"] == 6
        weights.append(open_checkpoint(folder / "run").load_tensors("a.*"))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(one, weights[1][leaf]) for leaf, one in weights[0].items())


LEAVING = """\
import os, signal
from torchrelay.lifecycle import Network as Base

class Network(Base):
    def build(self, context):
        super().build(context)
        model = context.phases["a"].model
        plain, seen = model.loss, []

        def loss(outputs, batch):
            seen.append(1)
            if {leaves} and len(seen) == 3 and not os.path.exists(context.run_dir + "/left"):
                open(context.run_dir + "/left", "w").close()
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(outputs, batch)

        model.loss = loss
"""


def test_pdr_6_keys_that_no_profile_reads_are_told_in_one_line_or_refused(tmp_path, capfd):
    """PDR-6, ALF-16: told are keys of the profiles that run, with the name that was meant; not of others."""
    path = written(tmp_path)
    text = path.read_text().replace("data_path: data,", "data_path: data, data_convertor: x.py,")
    text = text.replace("data_path: data/1.txt,", "data_path: data/1.txt, of_another: 1,")
    path.write_text(text + "  widht: 3\n")
    model, made = tmp_path / "model.py", "super().__init__()"
    asks = f"{made}\n        self.height = hyper_parameters.get('height')"
    model.write_text(model.read_text().replace(made, asks))
    run(tmp_path, "+hyper_parameters.heigt=3", "runner.train1.epochs=1")
    (line,) = [one for one in capfd.readouterr().err.splitlines() if "never read" in one]
    assert "dataset.d.data_convertor (line " in line and "did you mean data_converter?" in line
    assert "hyper_parameters.heigt (line 1, did you mean height?)" in line and "widht" in line
    assert "of_another" not in line and line.endswith("(an error with --strict-config)")
    config = load_config(path, ["runner.train1.save_checkpoint_path=strict"])
    with pytest.raises(StepFailedError, match=r"hyper_parameters\.widht: was never read") as caught:
        run_config(config, strict=True)
    assert caught.value.exit_code == 2 and not (tmp_path / "strict").exists()


def test_pdr_6_keys_for_classes_of_a_profile_that_does_not_run_are_left_alone(tmp_path, capfd):
    """PDR-6: what a step of another profile of the file may read is nobody's mistake."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text("from torchrelay.lifecycle import Startup\n")
    words = ["+hyper_parameters.scale=1", "runner.infer1.startup_class_path=mine.py"]
    run(tmp_path, *words)
    assert "never read" not in capfd.readouterr().err
    run(tmp_path, *words, mode=["train1", "infer1"])
    assert "never read: hyper_parameters.scale" in capfd.readouterr().err
