"""What is fuzzed: readers of unverified bytes, and the real files from which mutants are made."""

from __future__ import annotations

import json
import random
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import fuzz_mutation as mutation

from torchrelay.checkpoint.format.canonical_json import seal, unseal
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.shard import header
from torchrelay.checkpoint.log import record
from torchrelay.jobs.config.config import read_config
from torchrelay.jobs.config.yaml_reader import read_findings
from torchrelay.metadata.zip_reader import open_zip

GOLDEN = Path(__file__).resolve().parents[2] / "tests/golden"
_JOB = "fuzz"


@dataclass(frozen=True)
class Target:
    """`read` takes bytes and raises nothing but our errors; `mutate` makes the bytes from `seeds`."""

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], None]
    mutate: Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def targets() -> dict[str, Target]:
    """All targets by name."""
    found = (_config(), _log(), _manifest(), _header(), _archive())
    return {target.name: target for target in found}


class UnlikeError(Exception):
    """What was accepted does not mean the same when it is written and read again."""


def _config() -> Target:
    seeds = [
        b"mode: [train]\nepochs: 10\nlr: 1e-3\nrunner:\n  - {name: a, class: single}\n  - {name: b}\n",
        b"a: 'x: y'\nb: \"\\u00e9\"\nc: |\n  text\n  more\nd: >-\n  folded\n? e\n: [1, 2.5, true, null, ~]\n",
        b"# comment\ndataset:\n- path: data/x\n  batch_size: 32\n  on: no\n",
    ]
    seeds.append(_CONFIGURATION)
    folder = Path(tempfile.gettempdir())

    def read(data: bytes) -> None:
        read_findings(data)
        found = read_config(data, "c.yaml", folder, environ={})
        again = read_config(found.resolved_text().encode(), "r.yaml", folder, environ={})
        if (again.id, again.resolved_text()) != (found.id, found.resolved_text()):
            raise UnlikeError("a configuration that was accepted")

    return Target("config", seeds, read, mutation.of_bytes)


_CONFIGURATION = b"""workspace: .
mode: [a]
runner:
- {name: a, epochs: 3, phases: p, time_limit: 1h, keep_best: {metric: x, mode: max}, selected_gpus: "0,1"}
- {name: b, class: infer, epoch: 1..3, init_rename: {a.: b.}}
phase:
- {name: p, model: "m:M", dataset_name: d}
dataset:
- {name: d, batch_size: 2, data_path: "{workspace}/${env:A,x}",
   more: ["${seed}", {b: "${dataset.d.batch_size}"}]}
hyper_parameters: {optimizer: {learning_rate: 1e-3, c: "$${x}"},
  own: "${hyper_parameters.optimizer.c} {{workspace}}"}
upstream: {e: r@best}
"""


def _log() -> Target:
    whole = (GOLDEN / "log_record_v1.json").read_bytes()
    said = unseal("record", whole, "record")
    slot, job = said["slot"], said["job"]

    def read(data: bytes) -> None:
        found = record.decode(data, slot=slot, job=job)
        record.decode_link(data, slot=slot, job=job)
        if record.decode(record.encode(found), slot=slot, job=job) != found:
            raise UnlikeError("a record that was accepted")

    def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        """Three of four are sealed again, so that what lies behind the digest is reached."""
        if rng.random() < 0.25:
            return mutation.of_bytes(rng, data, others)
        changed = mutation.of_json(rng, json.dumps(unseal("record", data, "record")).encode())
        try:
            return seal("record", json.loads(changed))
        except ValueError:  # what canonical JSON cannot write cannot be sealed
            return mutation.of_bytes(rng, data, others)

    return Target("log", [whole], read, mutate)


def _manifest() -> Target:
    seeds = [path.read_bytes() for path in sorted(GOLDEN.glob("manifest_*v1.json"))]

    def read(data: bytes) -> None:
        written = codec.encode(codec.decode(data))
        if codec.encode(codec.decode(written)) != written:
            raise UnlikeError("a manifest that was accepted")

    return Target("manifest", seeds, read, _either)


def _either(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return mutation.of_json(rng, data) if rng.random() < 0.75 else mutation.of_bytes(rng, data, others)


def _header() -> Target:
    whole = (GOLDEN / "trainer_0.4.main.safetensors").read_bytes()
    size = len(whole)
    head = whole[: 8 + int.from_bytes(whole[:8], "little")]

    def read(data: bytes) -> None:
        length = header.header_length(data[:8], size, what="shard")
        header.parse(data[:length].ljust(length, b" "), size, what="shard")

    def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        if rng.random() < 0.2:
            return mutation.of_bytes(rng, data, others)
        said = json.loads(data[8:])
        if rng.random() < 0.6:
            inner = said["__metadata__"]["torchrelay"].encode()
            said["__metadata__"]["torchrelay"] = _either(rng, inner, [inner]).decode("utf-8", "replace")
            text = json.dumps(said).encode()
        else:
            text = mutation.of_json(rng, data[8:])
        text += b" " * (-(len(text) + 8) % 4096)
        return len(text).to_bytes(8, "little") + text

    return Target("header", [head], read, mutate)


def _archive() -> Target:
    folder = Path(tempfile.mkdtemp(prefix="torchrelay-fuzz-"))
    path = folder / "a.zip"
    with zipfile.ZipFile(path, "w") as writer:
        writer.writestr("index.json", b'{"a": 1}')
        writer.writestr("data/weights.safetensors", bytes(range(256)))
    seed = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with open_zip(path) as found:
            for name, member in found.members.items():
                if len(found.read(name, 1 << 20)) != len(member):
                    raise UnlikeError(f"member {name!r}")

    return Target("archive", [seed], read, mutation.of_bytes)
