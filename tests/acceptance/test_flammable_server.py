"""FLM-6: the server of a user's program, as a process, and what it refuses to serve."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from program_cases import Script
from safetensors.torch import load, save
from served import wait_until
from torchrun import clean_environment


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Script:
    return Script(tmp_path, capsys)


@contextmanager
def server(cwd: Path, *command: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str], Path]]:
    """A server as a process; ended by kill where the block did not end it."""
    log = cwd / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", "0"], cwd=cwd, env=clean_environment(None), text=True,
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: "serving" in log.read_text() or process.poll() is not None, 90)
        found = re.search(r"serving .* at (http://127\.0\.0\.1:\d+)/", log.read_text())
        assert found, log.read_text()
        with httpx.Client(base_url=found[1], timeout=60) as client:
            yield client, process, log
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)


def left(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(60)


def evaluated(script: Script, samples: Sequence[Sequence[float]]) -> list[list[float]]:
    """What `eval` writes for files of these."""
    inputs, results = script.directory / "in", script.directory / "out"
    inputs.mkdir(exist_ok=True)
    for at, sample in enumerate(samples):
        (inputs / f"{at}.json").write_text(json.dumps(sample))
    assert script("eval", str(inputs), str(results)).rc == 0
    return [json.loads((results / f"{at}.json.json").read_text()) for at in range(len(samples))]


def test_flm_6_what_is_not_trained_is_refused(script: Script) -> None:
    """FLM-6: no run, no trained epoch, changed code, a bad address: code 2, and nothing listens."""
    none = script("server", "--port", "0")
    assert none.rc == 2 and "train first" in none.err
    script.more("def iteration(self, batch): raise RuntimeError('as planned')")
    assert script("train").rc == 1
    untrained = script("server", "--port", "0")
    assert untrained.rc == 2 and "no trained epoch yet" in untrained.err and "Traceback" not in untrained.err
    script.path.write_text(script.path.read_text().replace("raise RuntimeError('as planned')", "return {}"))
    changed = script("server", "--port", "0")
    assert changed.rc == 2 and "--ignore" in changed.err and "--run" in changed.err
    assert script("train", "--max-epochs", "1").rc == 0
    for words in (
        ("--host", "0.0.0.0"),
        ("--token-file", "nothing"),
        ("--epoch", "7"),
        ("--watch", "--epoch", "1"),
    ):
        assert script("server", "--port", "0", *words).rc == 2, words


@pytest.mark.ranks
def test_flm_6_a_run_is_served_as_eval_answers(script: Script) -> None:
    """FLM-6: health, metadata, predictions as `eval` makes them, watched epochs, and SIGTERM that drains."""
    assert script("train", "--max-epochs", "1").rc == 0
    samples = [[0.25 * at, -1.0 / (at + 1)] for at in range(12)]
    wanted = evaluated(script, samples)
    with server(script.directory, str(script.path), "server", "--watch") as (client, process, log):
        assert client.get("/health").json() == {"status": "ok"}
        told = client.get("/metadata").json()
        note = json.loads((script.run / "program.json").read_text())
        assert (told["run"], told["epoch"], told["code_id"]) == (script.run.name, 1, note["code_id"])
        assert told["signature"]["inputs"] == [{"name": "input", "shape": ["batch", 2], "dtype": "float32"}]
        assert told["signature"]["outputs"] == [{"name": "output", "shape": ["batch", 1], "dtype": "float32"}]

        def ask(sample: Sequence[float]) -> list[float]:
            answer = client.post("/predict", json={"sample": sample})
            assert answer.status_code == 200, answer.text
            return answer.json()["result"]

        assert [ask(one) for one in samples] == wanted, "one after the other: the same bits"
        with ThreadPoolExecutor(6) as pool:
            together = torch.tensor(list(pool.map(ask, samples * 3)))
        assert torch.allclose(together, torch.tensor(wanted * 3), atol=1e-6)
        binary = client.post(
            "/predict",
            content=save({"x": torch.tensor(samples)}),
            headers={"content-type": "application/octet-stream"},
        )
        assert torch.allclose(load(binary.content)["result"], torch.tensor(wanted), atol=1e-6)
        assert script("train", "--max-epochs", "3").rc == 0
        wait_until(lambda: client.get("/metadata").json()["epoch"] == 3)
        assert ask(samples[1]) == evaluated(script, samples)[1]
        assert left(process) == 0
        assert log.read_text().endswith("left\n") and "epoch 3 of" in log.read_text()


@pytest.mark.ranks
def test_flm_6_serve_runs_the_archived_code(script: Script) -> None:
    """FLM-6: `torchrelay serve RUN@best` serves by the code of the run, whatever lies there now."""
    script.more("best = ('val/loss', 'min')")
    script.more("def postprocess(self, output): return {'is': float(output), 'by': 'the archived code'}")
    assert script("train", "--max-epochs", "1").rc == 0
    wanted = evaluated(script, [[1.0, 2.0]])[0]
    script.path.write_text("raise SystemExit('not this')")
    command = ("-m", "torchrelay", "serve", f"{script.run}@best", "--max-batch", "1")
    with server(script.directory, *command) as (client, process, _):
        answer = client.post("/predict", json={"sample": [1.0, 2.0]}).json()
        assert answer == {"result": wanted, "epoch": 1} and wanted["by"] == "the archived code"
        assert left(process) == 0
