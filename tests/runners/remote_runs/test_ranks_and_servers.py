"""Runs in stores with ranks on several hosts, one of which is killed, and on a real S3 server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from s3_server import BUCKET, needs_s3, s3_server
from stored_jobs import Hosts, train, weights
from torchrun import torchrun

import torchrelay
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.cli.main import main

PROGRAM = Path(__file__).resolve().parents[2] / "programs/stored_run.py"


def weights_of(epochs: int) -> torch.Tensor:
    """What the program's model is after these epochs, by torch alone."""
    torchrelay.seed(3)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        loss = model(torch.arange(8.0).reshape(2, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.ranks
def test_two_hosts_killed_and_gone_on_with_on_two_others(tmp_path: Path) -> None:
    """Each rank puts its own log, a killed job loses no committed epoch, the bits are those of no kill."""
    store = tmp_path / "store"
    url = f"local://{store}/runs/hello"
    words = (url, str(tmp_path / "first"), "5")
    first = torchrun(PROGRAM, *words, "1", ranks=2, cwd=tmp_path, warm=True)
    assert first.rc != 0, str(first)
    words = (url, str(tmp_path / "second"), "5")
    second = torchrun(PROGRAM, *words, ranks=2, cwd=tmp_path, warm=True)
    assert second.rc == 0, str(second)
    run = RunDirectory(store / "runs/hello")
    assert run.status()["state"] == "FINISHED"
    assert [line["epoch"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    for attempt, ranks in ((0, (0,)), (1, (0, 1))):
        for rank in ranks:
            assert (run.path / f"logs/attempt_{attempt}/rank_{rank}.log").exists()
    assert torch.equal(weights(store / "runs/hello"), weights_of(5))
    assert main(["ls", url]) == main(["status", url]) == 0


@needs_s3
def test_a_run_on_an_s3_server(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Trained, gone on with on another host, looked at by its URL; versions are what the server tells."""
    with s3_server() as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/runs/hello"
        train(tmp_path / "whole", 3)
        assert train(url, 2, trackers=["csv"]) == 2
        hosts.on("two")
        assert train(f"{url}/", 3, trackers=["csv"]) == 3
        assert torch.equal(weights(url), weights(tmp_path / "whole"))
        capsys.readouterr()
        assert main(["status", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["epoch"] == 3
        for words in (["ls", f"s3://{BUCKET}/runs"], ["top", url, "--once"], ["verify", url], ["show", url]):
            assert main(words) == 0, words
            assert capsys.readouterr().out
        assert main(["top", url, "--json"]) == 0
        looked = json.loads(capsys.readouterr().out)["runs"][0]
        assert (looked["name"], looked["state"], list(looked["ranks"])) == ("hello", "FINISHED", ["0"])
