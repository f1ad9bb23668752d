"""The source code of Python's standard library as windows of bytes: the text is on every machine.

Which files, and in which order, follows from their names alone; what they say follows from Python's patch
version. So the corpus has a manifest with a digest, and a run refuses to resume with another text.
"""

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders: what was installed, what tests, and what is tables and prose rather than code."""
VALIDATION = 26
"""Of 256 files so many are kept for the validation: about a tenth."""


def files_of(part, max_bytes):
    """The files of `train` or `validation`, by name: as many as fit into `max_bytes`, as if drawn by lot.

    None has more than a quarter of these bytes.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [one.relative_to(root) for one in root.rglob("*.py")]
    digests = {
        name.as_posix(): hashlib.sha256(name.as_posix().encode()).digest()
        for name in names
        if not LEFT_OUT & set(name.parts)
    }
    chosen, size = [], 0
    for name in sorted(digests, key=digests.__getitem__):
        if (digests[name][-1] < VALIDATION) != (part == "validation"):
            continue
        data = (root / name).read_bytes()
        if len(data) > max_bytes // 4 or size + len(data) > max_bytes:
            continue
        chosen.append((name, data))
        size += len(data)
    return sorted(chosen)


class Reader:
    """Windows of `context` bytes, each with the bytes that follow: sample i begins at byte i * context."""

    def __init__(self, dataset):
        keys = dataset.extra
        self.context = keys["context"]
        files = files_of(keys["part"], keys["max_bytes"])
        self.rows = [f"{name} {len(data)} {hashlib.sha256(data).hexdigest()}" for name, data in files]
        self.text = torch.frombuffer(bytearray(b"".join(data for _, data in files)), dtype=torch.uint8)

    def __len__(self):
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index):
        begin = index * self.context
        window = self.text[begin : begin + self.context + 1].long()
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Corpus:
    """Record of the training and validation text; registered as a blob, so every checkpoint has it."""

    parts: dict

    @cached_property
    def digest(self):
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()

    def state_dict(self):
        files, size = (sum(len(rows) for rows in self.parts.values()), sum(map(_bytes, self.parts.values())))
        return {"manifest": self.digest, "files": files, "bytes": size}

    def load_state_dict(self, state):
        """Refuse another text: the order of the data would mean nothing, and no number could be compared."""
        if state["manifest"] != self.digest:
            raise ValueError(
                f"this run was trained on the corpus {state['manifest'][:12]} ({state['files']} files), and "
                f"this Python's standard library is {self.digest[:12]}: resume with the Python that began it"
            )


def _bytes(rows):
    return sum(int(row.split(" ")[-2]) for row in rows)
