"""The run of a configuration, served as it lies there."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import httpx
import lifecycle_cases
import pytest
import torch
from pytest import approx
from served import wait_until
from torchrun import clean_environment

from torchrelay.errors import UsageError
from torchrelay.tools.serving.program_server import EpochModelSource, configured_model


def result(served: object, row: list[float]) -> float:
    """The answer to one sample, by the handler."""
    handler = served.handler  # type: ignore[attr-defined]
    with torch.inference_mode():
        (answer,) = handler.predict([handler.decode(row)])
    return float(answer)


def predictions(folder: Path) -> list[tuple[list[float], float]]:
    """What the profile that infers said of each sample by the newest epoch: its numbers and the answer."""
    lifecycle_cases.run(folder, mode=["infer1"])
    rows = [json.loads(line) for line in (folder / "out/predictions.jsonl").read_text().splitlines()]
    rows = rows[-lifecycle_cases.ROWS :]
    texts = "\n".join((folder / f"data/{name}.txt").read_text() for name in (1, 2)).splitlines()
    return [
        ([float(x) for x in text.split()[:2]], float(row["prediction"]))
        for text, row in zip(texts, rows, strict=True)
    ]


def test_flm_6_answers_are_those_of_eval_and_newer_epochs_need_no_code(tmp_path: Path) -> None:
    """FLM-6: the archive makes the program once; a later epoch goes into it with every source deleted."""
    lifecycle_cases.run(tmp_path, "runner.train1.epochs=1")
    (tmp_path / "scratch").mkdir()
    sources = {name: (tmp_path / name).read_text() for name in ("model.py", "reader.py")}
    for name in sources:
        (tmp_path / name).unlink()
    model = configured_model(tmp_path / "run", tmp_path / "scratch")
    source = EpochModelSource(str(tmp_path / "run"), "last", model, print)
    first = source.first()
    assert [one.name for one in first.signature.inputs] == ["batch_0"]
    assert (first.name, first.epoch, first.code_id is None) == ("run", 1, False)
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    before = predictions(tmp_path)
    assert [result(first, row) for row, _ in before] == approx([said for _, said in before])

    lifecycle_cases.run(tmp_path, "runner.train1.epochs=2")
    after = predictions(tmp_path)
    assert after != before
    for name in sources:
        (tmp_path / name).unlink()
    second = source.newer(first)
    assert second is not None and second.epoch == 2
    assert [result(second, row) for row, _ in after] == approx([said for _, said in after])
    assert [result(first, row) for row, _ in before] == approx([said for _, said in before]), (
        "and the first stays"
    )


def test_a_model_without_a_program_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Where the model cannot be traced, the message says why and names --model."""
    lifecycle_cases.written(tmp_path)
    text = lifecycle_cases.MODEL.replace(
        "return self.line(batch[0]).squeeze(1)",
        "found = self.line(batch[0]).squeeze(1)\n"
        "        return found if found.detach().sum().item() > 0 else -found",
    )
    (tmp_path / "model.py").write_text(text)
    lifecycle_cases.run(tmp_path, "runner.train1.epochs=1")
    with pytest.raises(UsageError, match=r"no program: .*--model module:function"):
        configured_model(tmp_path / "run", tmp_path)


def asked(folder: Path, serving: str, row: list[float], *words: str) -> dict[str, object]:
    """The answer of a server of this command, which leaves with 0 after SIGTERM and nothing behind.

    The cache of torch's compiler is torch's own, and stays.
    """
    log, scratch = folder / "out.log", folder / "scratch"
    scratch.mkdir()
    with log.open("w") as out:
        server = subprocess.Popen(
            lifecycle_cases.command(*words, "--port", "0"), cwd=folder,
            env={
                **clean_environment(None),
                "TMPDIR": str(scratch),
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            }, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: "serving" in log.read_text() or server.poll() is not None, 90)
        found = re.search(rf"serving {serving} at (http://127\.0\.0\.1:\d+)/", log.read_text())
        assert found, log.read_text()
        answer = httpx.post(f"{found[1]}/predict", json={"sample": row}, timeout=60).json()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert not list(scratch.iterdir())
        return dict(answer)
    finally:
        server.kill()
        server.wait(60)


@pytest.mark.ranks
def test_flm_6_the_command_serves_a_configured_run(tmp_path: Path) -> None:
    """FLM-6: `torchrelay serve run@best`, asked over HTTP, leaves with 0 after SIGTERM and nothing behind."""
    lifecycle_cases.run(tmp_path, "runner.train1.epochs=1")
    ((row, said), *_) = predictions(tmp_path)
    answer = asked(tmp_path, "epoch 1 of run", row, "serve", "run@last", "--watch")
    assert (answer["result"], answer["epoch"]) == (approx(said), 1)


@pytest.mark.ranks
def test_flm_6_the_verb_serves_the_newest_run_of_a_configuration(tmp_path: Path) -> None:
    """FLM-6: `serve -m config.yaml` answers as `eval` does; changed code and --ignore are refused."""
    lifecycle_cases.written(tmp_path)

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*lifecycle_cases.command(words[0]), "-m", "config.yaml", "--runs", "runs", *words[1:]],
            cwd=tmp_path, env=clean_environment(None), capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip

    untrained = typed("serve")
    assert (untrained.returncode, "train first" in untrained.stderr) == (2, True), untrained.stderr
    assert typed("train", "--max-epochs", "1").returncode == 0
    (tmp_path / "sample.txt").write_text(
        "\n".join((tmp_path / "data/1.txt").read_text().splitlines()[:1]) + "\n"
    )
    told = typed("eval", "sample.txt", "out.jsonl")
    assert told.returncode == 0, told.stderr
    row = [float(one) for one in (tmp_path / "sample.txt").read_text().split()[:2]]
    answer = asked(
        tmp_path,
        r"epoch 1 of [0-9a-z-]+",
        row,
        "serve",
        "-m",
        "config.yaml",
        "--runs",
        "runs",
        "--epoch",
        "last",
    )
    assert answer["result"] == approx(json.loads((tmp_path / "out.jsonl").read_text())["prediction"])
    assert "--ignore has no effect" in typed("serve", "--ignore").stderr
    (tmp_path / "model.py").write_text(lifecycle_cases.MODEL + "# changed\n")
    assert typed("serve").returncode == 2
