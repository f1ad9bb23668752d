"""What the reader of configurations says of many texts, a JSON line each: run with two trees, and compare.

    PYTHONPATH=OLD/src python scripts/trials/config_answers.py > old.jsonl
    PYTHONPATH=NEW/src python scripts/trials/config_answers.py > new.jsonl
    cmp old.jsonl new.jsonl

The texts are all YAML of the tests, examples and pages, and mutations of it, the same ones in every run. A
text that is right is told by its ids, resolved form, origins and settings; any other by all its problems.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config, read_config
from torchrelay.jobs.config.schema import json_schema, key_table
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.jobs.config.yaml_reader import read_findings

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = int(os.environ.get("MUTATIONS", "20"))
VALUES = (
    *("'${upstream.low.width}'", "'${upstream.low.widht}'", "'${upstream.low.deep}'", "'${upstream.high.x}'"),
    *("'${upstream.low.strict}'", "'${upstream.low}'", "runs/low", "runs/none", "whole/one"),
    *("null", "~", "0", "-1", "1", "2", "1.5", "1e-3", "1e999", "010", "true", "no", "''", "x", "a/b"),
    *("../x", "[]", "[1, a]", "[a, a]", "{}", "{a: 1}", "{workspace}", '"{workspace}/model.py"'),
    *('"{work}/x"', "infer", "'${env:SET}'", "'${env:UNSET}'", "'${env:UNSET,7}'", "'${env:WORD}x'"),
    *("'${seed}'", "'${runner.a.epochs}'", "'${name}'", "'${nme}'", "'a${workspace}b'", "'$${x}'", "'${'"),
    *("model.py", "model.py:Own", "a.b:C", "a.b.C", "latest", "best", "3..", "5..1", "1..4", "[3, 1]"),
    *("1h30m", "01:30", "0,1", "[0, 0]", "runs/a@3", "$HOME/x", "sync", "ps", "geo", "cluster", "min"),
    *("QueueDataset", "!t 1", "&a 1", "*a", "\t", "'", '"', "[", "{", "- 1"),
)  # fmt: skip
KEYS = (
    *("epochs", "epoch", "class", "name", "stop", "max_epochs", "phases", "mode", "seed", "onnx", "every"),
    *("best", "epocsh", "nonsense", "server_num", "dataset_name", "keep_best", "metric"),
    *("infer_start_epoch", "worker_num", "init_model_path", "validation", "optimizer", "decay_steps"),
    *("lr_scheduler", "infer_end_epoch", "time_limit", "save_checkpoint_interval", "selected_gpus"),
    *("upstream", "checkpoint", "rename", "strategy", "data_path", "gradient_scale_strategy"),
    *("trainer_class", "save_checkpoint_path", "early_stopping", "fleet_mode", "<<"),
)  # fmt: skip
OVERRIDES = (
    *("seed=3", "sed=3", "runner.0.epochs=2", "runner.a.epohs=2", "+hyper_parameters.new=1"),
    *("hyper_parameters.new=1", "+runner.0.stop.max_steps=5", "name={workspace}/x", "mode=[a]"),
    *("dataset.0.batch_size=x", "x", "=1", "seed=[1", "seed.x=1", "run_dir='${env:WORD}'"),
    *("runner.0.server_num=1", "upstream.u=runs/x@3", "+upstream.u.run=runs/x"),
    *("hyper_parameters.optimizer.learning_rate=1e-2", "phase.0.validation.every=2"),
    *("+runner.0.keep_best.metric=a",),
)  # fmt: skip
_TOP_KEYS = "runner|phase|dataset|hyper_parameters|upstream|seed|name|mode|run_dir|workspace|debug|version"
_LIKE_ONE = re.compile(rf"(?m)^({_TOP_KEYS}): ?")
OWN = """\
hyper_parameters:
  lr: 2
  n: x
  file: a/b
  colour: red
  word: b
  many: [1, 2]
  pair: [1, x]
  inner: {width: 1}
  inners: [{width: 1, rate: 2}]
  table: {a: 1}
  on: true
  optimizer:
    class: Adam
    learning_rate: 1
    betas: [0.9, 0.99]
    lr_scheduler: {class: StepLR, step_size: 3, per: epoch}
rest: &x 1
"""
WHOLE = """\
version: 1
name: whole
workspace: "."
run_dir: "{workspace}/runs"
mode: [a, b]
debug: false
seed: 4
upstream:
  low: runs/low@best
  high: {run: "runs/high@3", into: model, prefix: x.y, rename: {a: b}, strict: false, keep: [q, r]}
runner:
- name: a
  class: local_cluster_train
  device: cpu
  selected_gpus: "0,1"
  fleet_mode: collective
  distribute_strategy: sync
  worker_num: 2
  epochs: 3
  epochs_per_partition: 1
  stop:
    max_steps: 5
    max_time: 1h30m
    early_stopping: {metric: loss, mode: min, patience: 2, min_delta: 1}
  time_limit: 90
  phases: [p, q]
  init_model_path: "runs/old@7"
  init_rename: {a: b}
  init_strict: false
  save_checkpoint_interval: -1
  save_checkpoint_path: "{workspace}/${name}/one"
  save_inference_interval: 2
  onnx: {every: 2, best: true}
  keep_last: 3
  keep_best: {metric: auc, mode: max}
  checkpoint:
    include: a*
    exclude: [b, c]
    max_failed_saves: 0
    near: near
    rename: {x: "y"}
  print_interval: 5
  on_crash: save
  replay: true
  runner_class_path: model.py:Own
- name: b
  class: infer
  init_model_path: "{workspace}/${name}/one"
  epoch: 1..3
  predictions_path: out.jsonl
  predictions_format: csv
  metrics_path: metrics
phase:
- name: p
  model: "{workspace}/model.py"
  dataset_name: d
  validation: e
- name: q
  model: package.models:Model
  dataset_name: e
  validation: {dataset_name: d, every: 2, metrics: loss}
  thread_num: 2
  shuffle_filelist: true
dataset:
- name: d
  type: QueueDataset
  batch_size: 5
  data_path: data
  grows: true
  data_converter: reader.py
  own: {deep: [1, {x: 2}]}
- name: e
  batch_size: ${env:N}
  data_path: ["{workspace}/data", "s3://b/c"]
  sparse_slots: a b
  dense_slots: "wide:4"
  padding: 1
hyper_parameters:
  optimizer: {class: SGD, learning_rate: 1, decay_steps: 3, decay_rate: 1, strategy: async, momentum: 0.9}
  width: "${seed}"
  path: "{workspace}/x"
  taken: "${upstream.low.width}"
  all: "${upstream.low.hyper_parameters}"
  within: "a ${upstream.low.path} {{workspace}} $${b}"
"""
"""With nearly every key."""
ENVIRON = {"SET": "3", "WORD": "w", "N": "4", "EPOCHS": "2", "ODD": "010", "HOME": "h"}


class Colour(enum.Enum):
    """For sections of users."""

    RED = "red"
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Inner:
    """For sections of users."""

    width: int
    rate: float = 0.5


@dataclasses.dataclass
class Own:
    """For sections of users."""

    optimizer: dict[str, Any] | None = None
    lr: float = 1.0
    n: int | str = 1
    file: Path | None = None
    colour: Colour = Colour.RED
    word: Literal["a", "b", 1] = "a"
    many: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    inner: Inner | None = None
    inners: list[Inner] = dataclasses.field(default_factory=list)
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    on: bool = False

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError("lr is below zero")


def texts() -> Iterator[str]:
    """YAML files, blocks of YAML in pages, and texts in programs that look like a configuration."""
    for folder in ("tests", "examples", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".yaml", ".yml"):
                yield path.read_text()
            elif path.suffix == ".md":
                yield from re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
            elif path.suffix == ".py":
                yield from _strings(path)


def _strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and len(text) < 20_000 and _LIKE_ONE.search(text) and "def " not in text:
            yield text


def mutated(rng: random.Random, text: str) -> str:
    """One to three changes of values, keys, lines or characters."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        what = rng.random()
        if what < 0.45:
            lines[at] = re.sub(
                r"(:\s|- ).*$", lambda found: found[1] + rng.choice(VALUES), lines[at], count=1
            )
        elif what < 0.65:
            lines[at] = re.sub(r"[a-z_]+(?=:)", lambda found: rng.choice(KEYS), lines[at], count=1)
        elif what < 0.8:
            indent = re.match(r"[ -]*", lines[at])
            lines.insert(
                at + 1, " " * len(indent[0] if indent else "") + f"{rng.choice(KEYS)}: {rng.choice(VALUES)}"
            )
        elif what < 0.9:
            del lines[at]
        else:
            where = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:where] + rng.choice("[]{}:,-'\"\t #&*!x0") + lines[at][where + 1 :]
        text = "\n".join(lines)
    return text


def answer(data: bytes, folder: Path, overrides: list[str]) -> Any:
    """All that is told of a text."""
    findings = read_findings(data)
    raw = [repr(findings.value), [repr(one) for one in sorted(findings.values.items(), key=repr)]]
    raw += [
        [repr(one) for one in findings.problems],
        sorted(map(repr, findings.broken)),
        repr(findings.ended),
    ]
    try:
        config = read_config(data, "c.yaml", folder, overrides, ENVIRON)
    except ConfigError as error:
        return [raw, [one.json() for one in error.problems]]
    except UsageError as error:
        return [raw, "usage", str(error)]
    except (TypeError, LookupError, AttributeError) as error:
        return [raw, "crash", repr(error)]
    return [raw, _right(config)]


def _right(config: Config) -> Any:
    found: list[Any] = [
        config.id,
        config.resolved_text(),
        config.printed(),
        config.origins(),
        config.identity,
    ]
    found += [{one.name: config.id_of(one.name) for one in config.settings.runner}, repr(config.settings)]
    found += [[one.json() for one in config.without_effect()]]
    for to in (None, dict, Own, Inner):
        for path in (
            "hyper_parameters",
            "hyper_parameters.optimizer",
            "hyper_parameters.own",
            "dataset.0",
            "rest",
        ):
            try:
                found.append(repr(config.section(path) if to is None else config.section(path, to)))
            except (UsageError, KeyError) as error:
                found.append(f"{type(error).__name__} {error}")
        found.append([one.json() for one in config.unused()])
    found += [
        repr(config.value(path, "none")) for path in ("seed", "runner.0.epochs", "runner.0.class", "a.b")
    ]
    return found


def _stored_runs(folder: Path) -> None:
    """Runs whose values others take, and copies of one where runs keep what they are built on."""
    for name, width in (("runs/low", 3), ("whole/one/lineage/low", 4), ("b/lineage/low", 5)):
        run = folder / name
        (run / "config").mkdir(parents=True)
        (run / "captured.1.json").write_text('{"config": "config"}')
        (run / "stage.json").write_text(json.dumps({"path": str(folder / "runs/low")}))
        text = (
            "workspace: /old\nhyper_parameters: {width: %d, path: '{workspace}/x', deep: {a: [1, '$${x}']}}\n"
        )
        (run / "config/resolved.yaml").write_text(text % width)


def main() -> None:
    """Write a line for every text."""
    folder = Path(tempfile.mkdtemp())
    for name in ("model.py", "reader.py", "your_startup.py", "data", "instance.py", "runner.py", "models.py"):
        (folder / name).touch()
    _stored_runs(folder)
    rng = random.Random(7)
    seeds = list(dict.fromkeys(texts()))
    seeds += [WHOLE] * 20 + [OWN, OWN.partition("rest")[0]] * 8
    print(json.dumps([json_schema(), key_table()]))
    for seed in seeds:
        for one in [seed, *(mutated(rng, seed) for _ in range(MUTATIONS))]:
            overrides = rng.sample(OVERRIDES, rng.choice((1, 2))) if rng.random() < 0.15 else []
            told = json.dumps(
                [one, overrides, answer(one.encode(errors="replace"), folder, overrides)], default=repr
            )
            sys.stdout.write(told.replace(str(folder), "FOLDER") + "\n")


if __name__ == "__main__":
    main()
