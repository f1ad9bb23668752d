"""What is measured: workloads, their processes, their engines, and what a full run may take."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

GIB = 1 << 30
LOADS = ("cold load", "warm load")


@dataclass(frozen=True)
class Step:
    """One start of processes for each engine: actions, ranks (0: no launcher), layout, whose files.

    `title` goes before the names of its actions in the table; a step that saves makes the files `files`.
    A `rare` one is left out where all is small.
    """

    actions: tuple[str, ...]
    ranks: int = 0
    layout: str = ""
    files: str = "f"
    title: str = ""
    rare: bool = False


@dataclass(frozen=True)
class Workload:
    """`module` measures it with `engines`; `rare` ones only where they are named or nothing is small."""

    name: str
    title: str
    module: str
    nbytes: int
    steps: tuple[Step, ...]
    engines: tuple[str, ...]
    rare: frozenset[str] = frozenset()
    loaded_part: float = 1.0

    @property
    def ranks(self) -> int:
        """The most processes at a time."""
        return max(1, *(step.ranks for step in self.steps))


SINGLE = (
    "torchrelay file",
    "torchrelay file, atomic=False",
    "torchrelay file, unverified",
    "torchrelay epoch",
    "torchrelay epoch, atomic=False",
    "torch.save",
    "torch.save, no CRC",
    "safetensors",
    "DCP",
    "DCP, 2 threads",
    "torchsnapshot",
    "Orbax",
)
RARE = frozenset(
    (
        "torchrelay file, unverified",
        "torchrelay epoch, atomic=False",
        "torch.save",
        "DCP",
        "DCP, 2 threads, plan caching",
    )
)


def _one_process(actions: Sequence[str] = LOADS) -> tuple[Step, ...]:
    return (Step(("save",)), *(Step((action,)) for action in actions))


def _reshard(title: str, files: str, ranks: int, layout: str, *, rare: bool = False) -> tuple[Step, ...]:
    return tuple(Step((action,), ranks, layout, files, title, rare) for action in LOADS)


def _on_ranks(layout: str) -> tuple[Step, ...]:
    return tuple(Step((action,), 4, layout) for action in ("save", *LOADS))


WORKLOADS = {
    one.name: one
    for one in (
        Workload("W1", "one process, 200 tensors", "single", 2 * GIB, _one_process(), SINGLE, RARE),
        Workload(
            "W2",
            "one process, 50,000 small tensors",
            "single",
            200_000_000,
            _one_process(),
            SINGLE,
            RARE | {"torchsnapshot", "Orbax"},
        ),
        Workload(
            "W3",
            "4 ranks, replicated",
            "ranks",
            GIB,
            _on_ranks("plain"),
            (
                "torchrelay epoch",
                "rank 0 torch.save, no CRC",
                "rank 0 safetensors",
                "DCP",
                "DCP, 2 threads",
                "DCP, 2 threads, plan caching",
                "torchsnapshot, replicated",
            ),
            RARE | {"rank 0 torch.save, no CRC"},
        ),
        Workload(
            "W4",
            "4 ranks, FSDP2 with AdamW",
            "ranks",
            2 * GIB,
            _on_ranks("fsdp"),
            (
                "torchrelay epoch",
                "per rank torch.save, no CRC",
                "DCP",
                "DCP, 2 threads",
                "DCP, 2 threads, plan caching",
                "torchsnapshot, per rank",
            ),
            RARE,
        ),
        Workload(
            "W5",
            "5 of 500 blobs",
            "single",
            2_000_000_000,
            _one_process(),
            SINGLE,
            RARE | {"torch.save, no CRC"},
            loaded_part=0.01,
        ),
        Workload(
            "W6",
            "FSDP2 with AdamW onto another mesh",
            "ranks",
            2 * GIB,
            (
                Step(("save",), 4, "fsdp", "of-4", "on 4, "),
                Step(("save",), 2, "fsdp", "of-2", "on 2, ", rare=True),
                *_reshard("4 to 2, ", "of-4", 2, "fsdp"),
                *_reshard("2 to 4, ", "of-2", 4, "fsdp", rare=True),
                *_reshard("4 to 2 x 2 (TP), ", "of-4", 4, "tp"),
                *_reshard("4 to one, ", "of-4", 1, "plain"),
            ),
            ("torchrelay epoch", "DCP", "DCP, 2 threads"),
            RARE,
        ),
        Workload(
            "W7",
            "training with saves in flight",
            "training",
            GIB,
            (Step(("train",)),),
            (
                "torchrelay, asynchronous",
                "torchrelay, synchronous",
                "torch.save, synchronous",
                "safetensors, synchronous",
                "DCP async",
                "DCP async, DefaultStager",
                "DCP async, DefaultStager, plan caching",
                "torchsnapshot async",
                "Orbax async",
            ),
            frozenset(("torchrelay, synchronous", "DCP async, DefaultStager, plan caching")),
        ),
    )
}
OTHERS = ("W8", "W9")
"""Commands of their own, see `bench.others`."""
NOT_COMPARABLE = {
    "W3": {"Orbax": "writes on several ranks only under jax.distributed, not under torch's process groups"},
    "W4": {"Orbax": "does not know DTensors"},
    "W6": {
        "torch.save, safetensors": "have whole tensors only",
        "torchsnapshot": "does not know DTensors",
        "Orbax": "does not know DTensors",
    },
}
PACKAGES = {
    "torchsnapshot": "torchsnapshot",
    "Orbax": "orbax.checkpoint",
    "safetensors": "safetensors",
    "torchrelay": "torchrelay",
}


def engines_of(workload: Workload, named: Sequence[str], *, small: bool) -> list[str]:
    """The engines that were named, else all, without the rare ones if small."""
    if named:
        known = [*workload.engines, *(["broken"] if workload.module == "single" else [])]
        return [name for name in known if any(_is_meant(name, wish, known) for wish in named)]
    return [name for name in workload.engines if not (small and name in workload.rare)]


def _is_meant(name: str, wish: str, known: Sequence[str]) -> bool:
    """A wish that is a name means only that; another one means all names that begin so."""
    return name == wish or (wish not in known and name.startswith(wish))


def missing_package(engine: str) -> str | None:
    """The package that an engine needs and that is not installed here."""
    for part, package in PACKAGES.items():
        if part in engine and importlib.util.find_spec(package.partition(".")[0]) is None:
            return package
    return None


def grouped(steps: Sequence[Step], *, small: bool) -> list[Step]:
    """Every action in processes of its own; small: the two loads of the same files one after the other.

    Rare steps are left out then.
    """
    if not small:
        return list(steps)
    found: dict[tuple[object, ...], Step] = {}
    for step in steps:
        if step.rare:
            continue
        key = (step.ranks, step.layout, step.files, step.title, "save" in step.actions)
        before = found[key].actions if key in found else ()
        found[key] = Step((*before, *step.actions), step.ranks, step.layout, step.files, step.title)
    return list(found.values())


def likely_secs(workload: Workload, engines: int, scale: float, *, small: bool) -> float:
    """About what one round takes: starting processes, making and comparing the content, moving bytes."""
    gib = workload.nbytes * scale / GIB
    secs = 1.5 + 3 * gib  # limits
    for step in grouped(workload.steps, small=small):
        start = 1.6 + 0.9 * max(0, step.ranks - 1)
        secs += engines * (start + gib * (6.0 + 1.5 * step.ranks) * len(step.actions))
    if workload.module == "training":
        secs += engines * (3 if small else 35)
    return secs
