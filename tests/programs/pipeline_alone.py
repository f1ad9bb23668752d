"""The last stage of examples/pipeline, of which only its run is left: no upstream, no source, no network.

pipeline_alone.py RUN FOLDER

Takes the source out of RUN, evaluates, trains on, exports, and then deploys the export without RUN, by
torch and safetensors alone. Prints what lineage says, and a line of JSON at last.
"""

from __future__ import annotations

import importlib
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from torchrelay import lifecycle
from torchrelay.jobs.config.config import load_config
from torchrelay.tools.cli.main import main as torchrelay


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("there is no network")


def alone(run: Path, folder: Path) -> dict[str, Any]:
    assert torchrelay(["runs", "code", str(run), "-o", str(folder / "source")]) == 0
    shutil.copy(run / "config/source.yaml", folder / "source/agent.yaml")
    evaluated = evaluate(run, folder)
    assert torchrelay(["verify", str(run), "--replay"]) == 0
    assert torchrelay(["runs", "lineage", str(run)]) == 0
    went_on = int(stage(run, folder, "train", "runner.train.epochs=7")["train"])
    again = evaluate(run, folder)
    assert (
        torchrelay(
            ["ckpt", "export", str(run), "--to", "safetensors", "-o", str(folder / "agent.safetensors")]
        )
        == 0
    )
    given = [f"runner.train.save_checkpoint_path={run}"]
    width = load_config(folder / "source/agent.yaml", given).section("hyper_parameters")["width"]
    shutil.rmtree(run)
    return {
        "evaluated": evaluated,
        "went_on": went_on,
        "again": again,
        "deployed": deployed(folder, width),
    }


def stage(run: Path, folder: Path, what: str, *overrides: str) -> Any:
    given = [f"runner.train.save_checkpoint_path={run}", f"runner.evaluate.init_model_path={run}"]
    return lifecycle.run_config(load_config(folder / "source/agent.yaml", [*given, *overrides]), [what])


def evaluate(run: Path, folder: Path) -> dict[str, Any]:
    paths = [f"runner.evaluate.{what}_path={folder / what}.jsonl" for what in ("metrics", "predictions")]
    (row,) = stage(run, folder, "evaluate", *paths)["evaluate"]
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    return {**row, "digits": [one["digit"] for one in rows]}


def deployed(folder: Path, width: int) -> list[int]:
    """What a program reads that knows the model's source and one file."""
    sys.path.insert(0, str(folder))
    model = importlib.import_module("source.agent").Model({"width": width})
    digits = importlib.import_module("source.digits")
    stored = load_file(folder / "agent.safetensors")
    prefix = "agent.model."
    model.load_state_dict(
        {name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix)}
    )
    data = digits.Reader(type("Test", (), {"extra": {"part": "test"}}))
    with torch.no_grad():
        found: list[int] = model.eval()((data.pixels, data.labels)).argmax(1).tolist()
    return found


if __name__ == "__main__":
    socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse  # type: ignore[assignment]
    print(json.dumps(alone(Path(sys.argv[1]), Path(sys.argv[2]))))
