"""Registered containers and generators are live: saved as they are at a boundary, loaded in place."""

from __future__ import annotations

import json
import random
import runpy
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay import (
    Job,
    JobRunner,
    LocalSession,
    load_blobs,
    load_into,
    max_epochs,
    open_checkpoint,
    save_blobs,
)
from torchrelay.checkpoint.format.values import decode, encode
from torchrelay.errors import BlobError, DamagedError, FormatError, SaveFailedError, UsageError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@dataclass
class Best:
    score: float = 0.0
    weights: torch.Tensor | None = None


@dataclass
class State:
    step: int = 0
    seen: list[int] = field(default_factory=list)
    best: Best | None = None
    counts: dict[str, int] = field(default_factory=dict)


def built() -> dict[str, Any]:
    """What a program registers at every start."""
    return {
        "history": [],
        "ema": {"w": torch.zeros(2)},
        "recent": deque(maxlen=2),
        "seen": set(),
        "counts": Counter(),
        "by_class": defaultdict(lambda: 0),
        "order": OrderedDict(a=1, b=2),
        "raw": bytearray(b"0"),
        "table": np.zeros(3),
        "state": State(),
        "nested": {"inner": {"list": [torch.zeros(1)], "pair": (torch.zeros(1), 1)}, 3: "three"},
    }


def trained(held: dict[str, Any], epoch: int) -> None:
    """Every container changed in the ways that programs change them."""
    held["history"].append(epoch)
    held["ema"]["w"] = held["ema"]["w"] * 0.9 + 1
    held["ema"][f"extra{epoch}"] = torch.full((3,), float(epoch))
    held["ema"].pop(f"extra{epoch - 1}", None)
    held["recent"].append({"epoch": epoch, "t": torch.tensor(epoch)})
    held["seen"].add((epoch, "x"))
    held["counts"].update([epoch, epoch, "all"])
    held["by_class"][epoch % 2] += epoch
    held["order"].move_to_end("a" if epoch % 2 else "b")
    held["raw"].extend(bytes([epoch]))
    held["table"][epoch % 3] += 0.1
    held["state"].step += 1
    held["state"].seen.append(epoch)
    if held["state"].best is None or epoch % 2:
        held["state"].best = Best(epoch / 3, torch.full((2,), float(epoch)))
    held["state"].counts[str(epoch)] = epoch
    inner = held["nested"]["inner"]
    inner["list"].append(inner["list"][-1] + 1)
    inner["pair"][0].add_(epoch)
    held["nested"]["inner"] = dict(inner, epoch=epoch)


def content(value: Any) -> Any:
    """A value in a form that compares by types, order and bits."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(content(key), content(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, getattr(value, "maxlen", None), [content(item) for item in value]
    if isinstance(value, set):
        return "set", sorted(map(repr, value))
    if isinstance(value, (State, Best)):
        return type(value).__name__, content(vars(value))
    return type(value).__name__, value


def run(path: Path, held: dict[str, Any], epochs: int, **options: Any) -> None:
    """Train with these containers until so many epochs are over."""
    job = Job("containers", blobs=held)

    @job.epoch
    def train(ctx: Any) -> None:
        trained(held, ctx.epoch)

    job.stop_when(max_epochs(epochs))
    JobRunner(job, path, best=None, **options).train(options.get("session"))


def test_what_containers_hold_is_saved_and_resumed_in_place(tmp_path: Path) -> None:
    """A run cut after every epoch ends with the content of one that was not, in the very objects."""
    whole = built()
    run(tmp_path / "whole", whole, 5)
    for epochs in range(1, 6):
        held = built()
        before = {name: id(value) for name, value in held.items()}
        weight, inner = held["ema"]["w"], held["nested"]["inner"]["pair"][0]
        run(tmp_path / "cut", held, epochs)
        assert {name: id(value) for name, value in held.items()} == before
        assert epochs == 1 or inner.item() != 0  # loaded in place: closures see it
        assert epochs == 1 or weight.sum() > 0
    assert content(held) == content(whole)
    assert held["by_class"]["new"] == 0


def test_what_containers_hold_is_read_elsewhere(tmp_path: Path) -> None:
    """An epoch gives values, tensors by name, and fills containers, objects with state inside included."""
    held = built()
    run(tmp_path / "run", held, 3)
    checkpoint = open_checkpoint(tmp_path / "run", epoch=3)
    assert checkpoint.value("history") == [1, 2, 3]
    assert checkpoint["ema.w"][:].tolist() == held["ema"]["w"].tolist()
    assert checkpoint.value("state")["best"]["score"] == 1.0
    assert checkpoint.value("state.best.score") == 1.0
    assert checkpoint.value("history.1") == 2
    with pytest.raises(UsageError, match=r"no leaf 'state\.gone'"):
        checkpoint.value("state.gone")
    assert set(checkpoint.load_tensors("ema.*")) == {"ema.w", "ema.extra3"}
    other = built()
    objects = dict(other)
    checkpoint.load(other)
    assert content(other) == content(held)
    assert all(other[name] is objects[name] for name in objects)
    alone = torch.zeros(2)
    checkpoint.load({"ema.w": alone})
    assert alone.tolist() == held["ema"]["w"].tolist()
    with pytest.raises(
        BlobError, match=r"history \(dict\) cannot be changed in place .*ckpt.value\(.history.\)"
    ):
        checkpoint.load({"history": {}})


def test_files_of_blobs_fill_containers(tmp_path: Path) -> None:
    """A file of save_blobs stores containers and fills them in place."""
    held, other = built(), built()
    trained(held, 1)
    save_blobs(tmp_path / "f", held)
    load_into(tmp_path / "f", other)
    assert content(other) == content(held)
    assert load_blobs(tmp_path / "f", "history")["history"] == [1]


def test_a_group_holds_objects_and_everything_else(tmp_path: Path) -> None:
    """Modules in a container are blobs; what lies beside them is followed, also what comes and goes."""

    def start(epochs: int) -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        parts: dict[str, Any] = {"step": 0, "model": model, "sub": [torch.optim.SGD(model.parameters(), 0.1)]}
        job = Job("group", blobs=dict(parts=parts))

        @job.epoch
        def train(ctx: Any) -> None:
            parts["step"] += 1
            parts["best"] = model.weight.detach() + 1
            with torch.no_grad():
                model.weight.fill_(ctx.epoch)

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None).train()
        return parts

    start(2)
    parts = start(3)
    assert parts["step"] == 3
    assert parts["best"].tolist() == [[3.0, 3.0]]
    assert list(parts) == ["step", "model", "sub", "best"]
    checkpoint = open_checkpoint(tmp_path / "run")
    assert [name for name in checkpoint.blobs if name != "rng"] == ["parts", "parts.model", "parts.sub.0"]
    other = {"step": 0, "model": torch.nn.Linear(2, 1), "sub": []}
    model = other["model"]
    checkpoint.load({"parts": other}, strict=False)
    assert other["model"] is model
    assert model.weight.tolist() == [[3.0, 3.0]]
    assert other["step"] == 3


def test_an_object_that_is_replaced_in_its_container_fails_the_save(tmp_path: Path) -> None:
    """A module put where another one was registered, or beside it, is refused by name."""
    for key, text in (
        ("model", "parts.model is another Linear"),
        ("new", "parts.new is a Linear in a set, or was put into"),
    ):
        parts: dict[str, Any] = {"model": torch.nn.Linear(1, 1)}
        job = Job("group", blobs=dict(parts=parts))
        job.epoch(lambda ctx, parts=parts, key=key: parts.update({key: torch.nn.Linear(1, 1)}))
        job.stop_when(max_epochs(1))
        with pytest.warns(UserWarning, match=text), pytest.raises(SaveFailedError):
            JobRunner(job, tmp_path / key, best=None).train()


def test_the_workspace_has_the_live_container(tmp_path: Path) -> None:
    """ctx[name] is the object; what a task puts in its place is saved, and loaded into the registered one."""

    def start(epochs: int) -> tuple[list[int], list[int]]:
        live: list[int] = []
        rebound: list[int] = []
        job = Job("workspace", blobs=dict(live=live, rebound=rebound, ema={"w": torch.zeros(1), "n": 0}))

        @job.epoch
        def train(ctx: Any) -> None:
            assert ctx["live"] is live
            ctx["live"].append(ctx.epoch)
            ctx["rebound"] = [*ctx["rebound"], ctx.epoch]
            ctx["ema.w"] = torch.tensor([float(ctx.epoch)])
            ctx["ema.n"] += 1

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None).train()
        return live, rebound

    start(2)
    live, rebound = start(3)
    assert live == [1, 2, 3]
    assert rebound == [1, 2]  # loaded in place; the third epoch put another list into the workspace
    assert open_checkpoint(tmp_path / "run").value("rebound") == [1, 2, 3]
    assert open_checkpoint(tmp_path / "run").value("ema")["n"] == 3


def test_tensors_of_a_container_never_overwrite_others(tmp_path: Path) -> None:
    """A copy that was the model's own weight when the program built it comes back beside the weight."""

    def start(epochs: int) -> tuple[torch.nn.Linear, dict[str, Any]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1, bias=False)
        best = {"w": model.weight.data, "tied": model.weight}
        job = Job("best", blobs=dict(best=best, model=model))

        @job.epoch
        def train(ctx: Any) -> None:
            if ctx.epoch == 1:
                best["w"] = model.weight.detach().clone()
            with torch.no_grad():
                model.weight.add_(1)

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None).train()
        return model, best

    model, best = start(2)
    again, copies = start(3)
    assert copies["w"].tolist() == best["w"].tolist()
    assert copies["tied"] is again.weight
    assert torch.equal(again.weight, model.weight + 1)


def test_a_list_with_two_names_stays_one(tmp_path: Path) -> None:
    """What two containers hold together is one object after a resume, as the program built it."""
    for epochs in (1, 2, 3):
        history: list[int] = []
        record = Best(weights=torch.zeros(1))
        held = {"history": history, "more": {"history": history, "best": record}, "state": State(best=record)}
        job = Job("shared", blobs=held)

        @job.epoch
        def train(ctx: Any, history: list[int] = history, record: Best = record) -> None:
            history.append(ctx.epoch)
            record.score += 1
            assert record.weights is not None
            record.weights += 1

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None).train()
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.value("more") == {"history": [1, 2, 3], "best": checkpoint.value("state")["best"]}
    assert checkpoint.value("state")["best"]["score"] == 3


def test_patterns_leave_out_whole_containers(tmp_path: Path) -> None:
    """`exclude=` takes a container by its name or by all that lies below it; it stays as it was built."""
    for pattern in ("ema", "ema.*"):
        for epochs in (1, 2):
            ema: dict[str, Any] = {"w": torch.zeros(1), "n": 0}
            job = Job("left out", blobs=dict(ema=ema, history=[]))
            job.epoch(lambda ctx, ema=ema: ema.update(w=ema["w"] + 1, n=1))
            job.stop_when(max_epochs(epochs))
            JobRunner(job, tmp_path / pattern, best=None, exclude=[pattern]).train()
        assert ema["w"].item() == 1
        assert set(open_checkpoint(tmp_path / pattern).blobs) == {"history", "rng"}


def test_a_load_leaves_out_single_tensors_of_a_list(tmp_path: Path) -> None:
    """The tensor at that place stays as it is; where there is none, the refusal names the whole container."""
    parts = [torch.ones(2), torch.ones(2), torch.ones(1)]
    job = Job("parts", blobs=dict(held={"parts": parts}))
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", best=None).train()
    save_blobs(tmp_path / "held.safetensors", dict(held={"parts": parts}))
    checkpoint = open_checkpoint(tmp_path / "run")
    for load in (checkpoint.load, partial(load_into, tmp_path / "held.safetensors")):
        held = {"parts": [torch.zeros(2), torch.zeros(2)]}
        with pytest.raises(BlobError, match=r"held\.parts\.2 is left out, .*exclude=\['held'\]"):
            load(dict(held=held), exclude=["held.parts.2"])
        assert [one.tolist() for one in held["parts"]] == [[0, 0], [0, 0]]
        load(dict(held=held), exclude=["held.parts.0"])
        assert [one.tolist() for one in held["parts"]] == [[0, 0], [1, 1], [1]]


def test_parameters_of_an_optimizer_may_be_registered_later(tmp_path: Path) -> None:
    """A run whose parameters only the optimizer held resumes where a list or dict holds them too."""
    ends = []
    for run, cut in (("whole", 0), ("cut", 1)):
        for epochs in (1, 2) if cut else (2,):
            held = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.tensor(3.0))]
            optimizer = torch.optim.Adam(held, lr=0.1)
            later = dict(held={"all": held}) if cut and epochs == 2 else {}

            def train(ctx: Any, held: Any = held, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                sum((one**2).sum() for one in held).backward()
                optimizer.step()

            job = Job("later", blobs=dict(optimizer=optimizer, **later))
            job.epoch(train)
            job.stop_when(max_epochs(epochs))
            JobRunner(job, tmp_path / run, best=None).train()
        ends.append([one.detach().tolist() for one in held])
        assert held[0] is optimizer.param_groups[0]["params"][0]
    assert ends[0] == ends[1]


def test_emulated_nodes_have_copies_or_factories(tmp_path: Path) -> None:
    """Each of several nodes in a process has a container of its own; to change the shared one is refused."""
    history: list[int] = []

    def start(path: str, change: Any, **blobs: Any) -> None:
        job = Job("nodes", blobs=blobs)
        job.epoch(change)
        job.stop_when(max_epochs(2))
        JobRunner(job, tmp_path / path, best=None).train(LocalSession(["trainer_0", "trainer_1"]))

    start("copies", lambda ctx: ctx["history"].append(ctx.rank), history=history)
    assert history == []
    checkpoint = open_checkpoint(tmp_path / "copies")
    assert checkpoint.value("trainer_1:history") == [1, 1]
    start("made", lambda ctx: ctx["w"].update(w=ctx["w"]["w"] + 1), w=lambda ctx: {"w": torch.zeros(1)})
    assert open_checkpoint(tmp_path / "made")["w.w"][:].item() == 2
    with pytest.raises(SaveFailedError, match=r"change ctx\['history'\]"):
        start("direct", lambda ctx: history.append(1), history=history)
    with pytest.raises(UsageError, match="is one object, but 2 nodes run in this process"):
        start("tensors", lambda ctx: None, ema={"w": torch.zeros(1)})


@pytest.mark.parametrize(
    "value",
    [(1, torch.zeros(1)), MappingProxyType({"w": torch.zeros(1)}), (1, torch.Generator())],
    ids=["tuple", "mappingproxy", "generator"],
)
def test_what_cannot_be_followed_is_refused_where_it_is_declared(value: Any) -> None:
    """A fixed value with tensors or generators in it is refused with what to give instead."""
    with pytest.raises(UsageError, match="give a list, a dict or a dataclass"):
        Job("fixed", blobs=dict(value=value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"d": defaultdict(lambda: 0)}, "v.d is a defaultdict inside another value"),
        ([object()], r"v\[0\] is a builtins.object"),
    ],
)
def test_what_no_load_could_make_fails_the_first_save(tmp_path: Path, value: Any, text: str) -> None:
    """A value that could not be built again is refused, by its path, before anything is committed."""
    with pytest.raises(BlobError, match=text):
        run_nothing(tmp_path / "run", {"v": value}, 1)


def test_a_dataclass_that_comes_later_needs_to_be_known(tmp_path: Path) -> None:
    """Instances of a class that was registered may come and go; of any other class they fail the save."""

    @dataclass
    class Later:
        epoch: int

    def start(run: str, epochs: int, *points: Any) -> list[Any]:
        held = {"points": [*points]}
        job = Job("later", blobs=held)
        job.epoch(lambda ctx: held["points"].append(Later(ctx.epoch)))
        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / run, best=None).train()
        return held["points"]

    text = r"points\[0\] is an instance of the dataclass .*Later"
    with pytest.warns(UserWarning, match=text), pytest.raises(SaveFailedError):
        start("unknown", 1)
    start("known", 2, Later(0))
    assert start("known", 3, Later(0)) == [Later(epoch) for epoch in range(4)]


def run_nothing(path: Path, blobs: dict[str, Any], epochs: int) -> None:
    job = Job("nothing", blobs=blobs)
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(epochs))
    JobRunner(job, path, best=None).train()


NUMPY = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def generators() -> dict[str, Any]:
    """Generators of every kind, as a program makes them."""
    made: dict[str, Any] = {name: np.random.Generator(getattr(np.random, name)(3)) for name in NUMPY}
    made["torch"] = torch.Generator().manual_seed(3)
    made["old"] = np.random.RandomState(3)
    made["python"] = random.Random(3)
    return made


def drawn(made: dict[str, Any]) -> list[Any]:
    """Numbers that leave no generator between two words."""
    found: list[Any] = [torch.randn(3, generator=made["torch"]).tolist()]
    found += [made["old"].randn(), made["python"].gauss(0, 1), made["python"].random()]
    found += [[made[name].standard_normal(), made[name].integers(9, dtype=np.int32)] for name in NUMPY]
    return [*found, *(made[name].spawn(1)[0].random() for name in NUMPY)]


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    """Generators as blobs, and inside a container, give the numbers of a run that was not cut."""

    def start(path: str, epochs: int) -> list[Any]:
        alone, inside, numbers = generators(), generators(), []
        job = Job("generators", blobs={**alone, "inside": {"list": list(inside.items()), "n": 0}})

        @job.epoch
        def train(ctx: Any) -> None:
            numbers.append([drawn(alone), drawn(inside)])

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / path, best=None).train()
        return numbers

    whole = start("whole", 4)
    cut = [numbers for epochs in range(1, 5) for numbers in start("cut", epochs)]
    assert cut == whole
    stored = open_checkpoint(tmp_path / "cut", epoch=3).value("torch")
    assert torch.randn(3, generator=stored).tolist() == whole[3][0][0]


def test_the_stored_forms_of_containers_are_frozen() -> None:
    """Containers and generators are written and read as the frozen table has them."""
    committed = json.loads((GOLDEN / "container_values.json").read_text())
    maker = runpy.run_path(str(GOLDEN / "make_tables.py"))
    assert maker["container_rows"]() == committed
    for name, form in committed.items():
        if name != "blob":
            found = decode(form)
            again = (
                encode(found, "x") if name not in ("dataclass", "defaultdict of the program's own") else form
            )
            assert again == form
    assert decode(committed["dataclass"]) == {"x": 1, "next": {"x": 2.5, "next": None}}
    assert decode(committed["blob"], blob=lambda name: name) == {"model": "x.model"}


@pytest.mark.parametrize(
    "form",
    [
        {"$": "deque", "v": [1, [1, 2]]},
        {"$": "deque", "v": [-1, []]},
        {"$": "defaultdict", "v": ["eval", []]},
        {"$": "defaultdict", "v": ["list", [[1, 2], [1, 3]]]},
        {"$": "dataclass", "v": ["X", [["a", 1], ["a", 2]]]},
        {"$": "torch.Generator", "v": ["cpu", "AAAA"]},
        {"$": "torch.Generator", "v": ["no device", ""]},
        {"$": "numpy.Generator", "v": ["SeedSequence", {}, None]},
        {"$": "numpy.Generator", "v": ["PCG64", {"bit_generator": "PCG64"}, None]},
        {"$": "numpy.RandomState", "v": {"bit_generator": "os"}},
        {"$": "random.Random", "v": [3, "AAAA", None]},
    ],
)
def test_containers_that_nobody_wrote_are_refused(form: Any) -> None:
    """A damaged or strange form is damage or another version, never an object of another class."""
    with pytest.raises((DamagedError, FormatError)):
        decode(form)


def test_a_loader_with_a_registered_generator_resumes_to_the_same_order(tmp_path: Path) -> None:
    """The order that a DataLoader draws from a registered generator is that of a run that was not cut."""

    def start(path: str, epochs: int) -> list[list[int]]:
        generator, order = torch.Generator().manual_seed(7), []
        loader = torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True, generator=generator)
        job = Job("loader", blobs=dict(generator=generator))
        job.epoch(lambda ctx: order.append([int(one) for batch in loader for one in batch]))
        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / path, best=None).train()
        return order

    whole = start("whole", 3)
    assert [order for epochs in (1, 2, 3) for order in start("cut", epochs)] == whole


def test_epochs_in_which_entries_were_blobs_load_into_the_dict(tmp_path: Path) -> None:
    """What an earlier version stored entry by entry fills a live dict, and is one blob afterwards."""
    job = Job("old", blobs={"ema.w": torch.full((2,), 3.0), "ema.inner.n": 4, "ema.list": [torch.ones(1)]})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", best=None).train()

    ema: dict[str, Any] = {"w": torch.zeros(2), "inner": {"n": 0}, "list": [], "kept": 1}
    weight, inner = ema["w"], ema["inner"]
    open_checkpoint(tmp_path / "run").load({"ema": ema})
    assert weight.tolist() == [3.0, 3.0]
    assert inner == {"n": 4}
    assert ema["list"][0].item() == 1
    assert ema["kept"] == 1
    ema = {"w": torch.zeros(2), "inner": {"n": 0}, "list": []}
    job = Job("old", blobs=dict(ema=ema))
    job.epoch(lambda ctx: ema.update(w=ema["w"] + 1))
    job.stop_when(max_epochs(2))
    JobRunner(job, tmp_path / "run", best=None).train()
    assert ema["w"].tolist() == [4.0, 4.0]
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.value("ema")["inner"] == {"n": 4}


def test_blobs_are_loaded_into_containers_while_a_run_goes_on(tmp_path: Path) -> None:
    """ctx.load_blobs and load_blobs_from_checkpoints fill the registered container in place."""
    first = built()
    run(tmp_path / "first", first, 2)
    held = built()
    objects = dict(held)
    job = Job("second", blobs=held)

    @job.epoch
    def train(ctx: Any) -> None:
        ctx["history"] = ["other"]
        ctx.load_blobs(tmp_path / "first", ["history", "ema", "state"], epoch=2)
        assert ctx["history"] is objects["history"]
        ctx.load_blobs(tmp_path / "first", "ema.w", epoch=1)

    job.stop_when(max_epochs(1))
    runner = JobRunner(job, tmp_path / "second", best=None)
    runner.train()
    assert held["history"] == [1, 2]
    assert content(held["state"]) == content(first["state"])
    assert held["ema"]["w"].tolist() == [1.0, 1.0]
    assert set(held["ema"]) == set(first["ema"])
    with LocalSession() as session:
        held["ema"]["w"].fill_(9)
        held["history"].clear()
        assert runner.load_blobs_from_checkpoints(["ema.w", "history"], epoch=1, session=session)


def test_a_tensor_without_memory_in_a_container_gets_the_content(tmp_path: Path) -> None:
    """What stands on the meta device in a container is loaded to the CPU, and not left without content."""
    save_blobs(tmp_path / "c", {"c": {"a": torch.ones(2)}})
    live = {"a": torch.zeros(2, device="meta")}
    load_into(tmp_path / "c", {"c": live})
    assert live["a"].tolist() == [1, 1]
