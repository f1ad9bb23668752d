"""What a load makes anew lies in memory as it did when it was saved."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from keeps import Keeps
from torch import nn

from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.dtypes import as_copied
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.value_decoding import decode
from torchrelay.checkpoint.format.values import encode
from torchrelay.checkpoint.state.restore.plan import RestorePlan
from torchrelay.errors import DamagedError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
IMAGES = (2, 3, 4, 5)


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Of what was built otherwise than it is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def images(scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(IMAGES) * scale).to(memory_format=torch.channels_last)


def train(run: Path, epochs: int, build: Callable[[], dict[str, Any]], step: Callable[[Any], object]) -> Any:
    torch.manual_seed(0)
    blobs = build()
    seen: dict[str, Any] = {}
    job = Job("order", blobs=blobs)

    @job.epoch
    def epoch(ctx: Any) -> None:
        step(ctx)
        seen.update({name: ctx[name] for name in (*blobs, "made") if name in ctx})

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, best=None).train()
    return seen


def laid(value: Any) -> Any:
    """What is compared: bits, and where they lie."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), as_copied(value).tolist()
    if isinstance(value, numpy.ndarray):
        return str(value.dtype), value.shape, value.strides, value.tolist()
    if isinstance(value, (list, tuple)):
        return [laid(one) for one in value]
    if isinstance(value, dict):
        return {key: laid(one) for key, one in value.items()}
    if isinstance(value, nn.Module):
        return laid(dict(value.state_dict()))
    if isinstance(value, torch.optim.Optimizer):
        return laid(value.state_dict()["state"])
    return laid(value.state_dict()) if hasattr(value, "state_dict") else value


class Late(nn.Module):
    """Makes a buffer at its first call, and another one longer at each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)
        self.register_buffer("grows", torch.zeros(1, 1))

    def forward(self) -> None:
        if self.first is None:
            self.first = images()
        self.grows = torch.randn(len(self.grows) + 1, 3).t().contiguous().t()


class Own(torch.optim.Optimizer):
    """Keeps a moment that lies as its parameter, and one transposed, and has a step of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["moment"] = torch.zeros_like(parameter)
                state["turned"] = torch.zeros(parameter.shape[::-1]).permute(3, 2, 1, 0)
            state["moment"].add_(parameter.grad)
            state["turned"].sub_(parameter.grad)


def gained_tensor() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return {"held": [torch.zeros(2)]}, lambda ctx: ctx["held"].append(images())


def gained_tensor_with_a_gradient() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return {"held": {}}, lambda ctx: ctx["held"].setdefault("w", images().requires_grad_())


def gained_array() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return {"held": {}}, lambda ctx: ctx["held"].setdefault("a", numpy.asfortranarray(numpy.eye(3, 4)))


def gained_large_array() -> tuple[dict[str, Any], Callable[[Any], object]]:
    def step(ctx: Any) -> None:
        ctx["held"].setdefault("a", numpy.arange(200_000.0).reshape(2, 1000, 100).transpose(2, 0, 1))

    return {"held": {}}, step


def gained_large_array_of_bytes_in_the_other_order() -> tuple[dict[str, Any], Callable[[Any], object]]:
    def step(ctx: Any) -> None:
        ctx["held"].setdefault("a", numpy.arange(200_000, dtype=">f8").reshape(400, 500).T)

    return {"held": {}}, step


def new_tensor_of_the_workspace() -> tuple[dict[str, Any], Callable[[Any], object]]:
    def step(ctx: Any) -> None:
        if "made" not in ctx:
            ctx["made"] = images()

    return {}, step


def late_buffers() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return {"late": Late()}, lambda ctx: ctx["late"]()


def state_of_an_object() -> tuple[dict[str, Any], Callable[[Any], object]]:
    def step(ctx: Any) -> None:
        kept = ctx["keeps"].kept
        kept.setdefault("images", images())
        kept.setdefault("array", numpy.asfortranarray(numpy.eye(2, 3)))
        kept["twice"] = kept["images"]

    return {"keeps": Keeps()}, step


def state_of_an_own_optimizer() -> tuple[dict[str, Any], Callable[[Any], object]]:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    weight = [model.weight]

    def step(ctx: Any) -> None:
        ctx["model"](images()).square().sum().backward()
        ctx["own"].step()
        model.zero_grad()

    return {"model": model, "own": Own(weight, {"lr": 0.1})}, step


def gained_integers_of_four_bits() -> tuple[dict[str, Any], Callable[[Any], object]]:
    def step(ctx: Any) -> None:
        ctx["held"].setdefault("x", torch.arange(12, dtype=torch.uint8).view(3, 4).t().view(torch.uint4))

    return {"held": {}}, step


def one_channel() -> tuple[dict[str, Any], Callable[[Any], object]]:
    def step(ctx: Any) -> None:
        if not ctx["held"]:
            ctx["held"]["x"] = torch.randn(2, 1, 3, 3).to(memory_format=torch.channels_last)

    return {"held": {}}, step


def state_that_lies_otherwise_than_its_parameter() -> tuple[dict[str, Any], Callable[[Any], object]]:
    turned, straight = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    turned.data = turned.data.t()
    optimizer = torch.optim.SGD([straight, turned], lr=0.1, momentum=0.9)

    def step(ctx: Any) -> None:
        (turned.square().sum() + straight.square().sum()).backward()
        optimizer.step()
        state = optimizer.state
        state[turned].setdefault("own", torch.zeros(4, 4)).add_(1)
        state[straight].setdefault("shared", state[turned].setdefault("shared", torch.zeros(4, 4).t()))
        state[turned]["shared"].add_(1)

    return {"turned": turned, "straight": straight, "optimizer": optimizer}, step


def switched(
    built: torch.memory_format, then: torch.memory_format, at: int = 1, tied: bool = False
) -> tuple[dict[str, Any], Callable[[Any], object]]:
    """A model and its moments; a task of epoch `at` lets the model lie otherwise than it was built."""
    model = nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 2)).to(memory_format=built)
    model.register_buffer("patch", torch.randn(1, 3, 2, 2).to(memory_format=built))
    first, last = model[0].weight, model[2].weight
    if tied:
        last.data = first.data
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(ctx: Any) -> None:
        if ctx.epoch == at:
            ctx["model"].to(memory_format=then)
            last.data = first.data if tied else last.data
        with torch.no_grad():
            model.patch.mul_(0.5)
        model(images() * model.patch.sum()).square().sum().backward()
        ctx["optimizer"].step()
        ctx["optimizer"].zero_grad()
        ctx["strides"] = [list(one.stride()) for one in (first, last, model.patch)]

    return {"model": model, "optimizer": optimizer}, step


def model_switched_to_channels_last() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return switched(torch.contiguous_format, torch.channels_last)


def model_switched_back() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return switched(torch.channels_last, torch.contiguous_format)


def model_switched_late() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return switched(torch.contiguous_format, torch.channels_last, at=2)


def tied_model_switched() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return switched(torch.contiguous_format, torch.channels_last, tied=True)


def tensors_laid_otherwise_by_a_task() -> tuple[dict[str, Any], Callable[[Any], object]]:
    def step(ctx: Any) -> None:
        if ctx.epoch == 1:
            ctx["held"]["x"] = ctx["held"]["x"].to(memory_format=torch.channels_last)
            ctx["alone"].data = ctx["alone"].data.t().contiguous().t()
        ctx["held"]["x"].mul_(torch.randn(()))
        ctx["alone"].mul_(torch.randn(()))

    return {"held": {"x": torch.randn(IMAGES)}, "alone": torch.randn(3, 4)}, step


def moments_of_an_object_whose_model_was_switched() -> tuple[dict[str, Any], Callable[[Any], object]]:
    blobs, step = switched(torch.contiguous_format, torch.channels_last)

    class Around:
        def __init__(self) -> None:
            self.inner = blobs["optimizer"]
            self.step, self.zero_grad = self.inner.step, self.inner.zero_grad
            self.state_dict, self.load_state_dict = self.inner.state_dict, self.inner.load_state_dict

    return {"optimizer": Around(), "model": blobs["model"]}, step


def parameters_of_a_container_laid_otherwise(
    hold: Callable[[nn.Parameter], dict[str, Any]] = lambda weight: {"held": {"w": weight}},
) -> tuple[dict[str, Any], Callable[[Any], object]]:
    weight = nn.Parameter(torch.randn(IMAGES))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)

    def step(ctx: Any) -> None:
        if ctx.epoch == 1:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        (weight * torch.randn(IMAGES)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"optimizer": optimizer, **hold(weight)}, step


def parameters_of_an_optimizer_alone_laid_otherwise() -> tuple[dict[str, Any], Callable[[Any], object]]:
    return parameters_of_a_container_laid_otherwise(lambda weight: {})


def buffer_of_inference_laid_otherwise() -> tuple[dict[str, Any], Callable[[Any], object]]:
    with torch.inference_mode():
        model = nn.Conv2d(3, 4, 2).requires_grad_(False)
        model.register_buffer("patch", torch.randn(IMAGES))

    def step(ctx: Any) -> None:
        if ctx.epoch == 1:
            with torch.inference_mode():
                model.patch = model.patch.contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            model.patch.mul_(torch.randn(()))
        assert model.patch.is_inference() and model.patch.view(2, 3, 4, 5).sum().isfinite()

    return {"model": model}, step


def slice_laid_otherwise() -> tuple[dict[str, Any], Callable[[Any], object]]:
    part = torch.randn(8, 3, 4, 5)[:2]

    def step(ctx: Any) -> None:
        if ctx.epoch == 1:
            part.data = part.data.contiguous(memory_format=torch.channels_last)
        part.mul_(torch.randn(()))

    return {"part": part}, step


KINDS = (
    buffer_of_inference_laid_otherwise,
    parameters_of_a_container_laid_otherwise,
    parameters_of_an_optimizer_alone_laid_otherwise,
    slice_laid_otherwise,
    model_switched_to_channels_last,
    model_switched_back,
    model_switched_late,
    tied_model_switched,
    tensors_laid_otherwise_by_a_task,
    moments_of_an_object_whose_model_was_switched,
    gained_integers_of_four_bits,
    one_channel,
    state_that_lies_otherwise_than_its_parameter,
    gained_tensor,
    gained_tensor_with_a_gradient,
    gained_array,
    gained_large_array,
    gained_large_array_of_bytes_in_the_other_order,
    new_tensor_of_the_workspace,
    late_buffers,
    state_of_an_object,
    state_of_an_own_optimizer,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_resumed_run_has_the_strides_of_an_undisturbed_one(kind: Any, tmp_path: Path) -> None:
    """Equal bits lie at equal strides, whatever made the tensor."""

    def run(folder: str, epochs: int) -> Any:
        torch.manual_seed(1)
        blobs, step = kind()
        return laid(train(tmp_path / folder, epochs, lambda: blobs, step))

    whole = run("whole", 4)
    run("cut", 1)
    run("cut", 2)
    assert run("cut", 4) == whole


def test_hooks_on_gradients_outlive_another_order(tmp_path: Path) -> None:
    """What a program hooked to a parameter's gradient when it was built is called behind a resume, too."""
    for epochs in (1, 2):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 2)
        called: list[int] = []
        torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()),
            lambda _, called=called: called.append(1),  # type: ignore[misc]
        )
        job = Job("hooks", blobs={"model": model})

        @job.epoch
        def epoch(ctx: Any, model: nn.Module = model) -> None:
            model.to(memory_format=torch.channels_last)
            model(images()).sum().backward()
            model.zero_grad()

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None).train()
        assert called == [1]


@pytest.mark.parametrize("name", ["model.weight", "optimizer.param.0.0"])
def test_ranks_keep_the_order_in_which_parameters_are_built(name: str, tmp_path: Path) -> None:
    """DistributedDataParallel mixes up gradients of what is laid otherwise behind it: one line says so."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for epochs in (1, 2):
            torch.manual_seed(0)
            model = nn.Conv2d(3, 4, 2)
            trained = nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            blob = name.split(".", maxsplit=1)[0]
            job = Job("ranks", blobs={blob: {"model": model, "optimizer": optimizer}[blob]})

            @job.epoch
            def epoch(ctx: Any, model: nn.Module = model, trained: nn.Module = trained) -> None:
                x = images()
                [right] = torch.autograd.grad(model(x).square().sum(), [model.weight])
                trained(x).square().sum().backward()
                assert torch.equal(model.weight.grad, right)
                model.zero_grad()
                if ctx.epoch == 1:
                    model.to(memory_format=torch.channels_last)

            job.stop_when(max_epochs(epochs))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                JobRunner(job, tmp_path / "run", best=None).train()
        assert model.weight.is_contiguous()
        [line] = [str(one.message) for one in told if "memory order" in str(one.message)]
        assert f"order of {name} is as" in line and "before DistributedDataParallel" in line
    finally:
        dist.destroy_process_group()


def test_another_program_keeps_its_own_order(tmp_path: Path) -> None:
    """A load of a model alone leaves it as it lies, for moments of a running optimizer lie so, too."""
    blobs, step = model_switched_to_channels_last()
    train(tmp_path / "run", 1, lambda: blobs, step)
    model = model_switched_to_channels_last()[0]["model"]
    open_checkpoint(tmp_path / "run").load({"model": model})
    assert torch.equal(model[0].weight, blobs["model"][0].weight) and model[0].weight.is_contiguous()


def test_state_of_torchs_optimizers_lies_as_the_parameter_that_it_finds(tmp_path: Path) -> None:
    """A model that was channels_last, and is not today, finds moments in its own order."""
    for epochs, kind in ((1, torch.channels_last), (2, torch.contiguous_format)):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 2).to(memory_format=kind)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        found: list[Any] = []
        job = Job("order", blobs={"model": model, "optimizer": optimizer})

        @job.epoch
        def epoch(
            ctx: Any, model: nn.Module = model, optimizer: Any = optimizer, found: list[Any] = found
        ) -> None:
            state = optimizer.state
            found += [state[one]["exp_avg"].stride() for one in model.parameters() if state[one]]
            model(images()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None).train()
    assert found == [one.stride() for one in model.parameters()]


def test_a_tensor_that_is_only_turned_is_saved_so(tmp_path: Path) -> None:
    """The bytes of an epoch are those of the one before, and each gives its own order."""

    def step(ctx: Any) -> None:
        held = ctx["held"]
        ready = "w" in held
        held["w"] = held["w"].contiguous() if ready else torch.arange(120.0).view(IMAGES)
        if not ready:
            held["w"] = held["w"].to(memory_format=torch.channels_last)

    run = tmp_path / "run"
    train(run, 2, lambda: {"held": {}}, step)
    orders = [
        {leaf.name: leaf.order for leaf in open_checkpoint(run, epoch=epoch).manifest.leaves}["held.w"]
        for epoch in (1, 2)
    ]
    assert orders == [(0, 2, 3, 1), None]


def test_a_slice_comes_back_dense_in_its_own_order(tmp_path: Path) -> None:
    """The gaps of a transposed slice are not kept, and its columns lie together as before."""

    def step(ctx: Any) -> None:
        ctx["held"].setdefault("x", torch.randn(500, 70).t()[10:40])

    train(tmp_path / "run", 1, lambda: {"held": {}}, step)
    found = train(tmp_path / "run", 2, lambda: {"held": {}}, step)
    assert found["held"]["x"].stride() == (1, 30)


def test_the_manifest_says_in_which_order_dimensions_lie(tmp_path: Path) -> None:
    """A column of orders with their rows, left out where there are none; odd ones are damage."""
    train(tmp_path / "run", 1, lambda: {"held": {}}, gained_tensor_with_a_gradient()[1])
    train(tmp_path / "none", 1, lambda: {"held": {"w": torch.zeros(2, 3)}}, lambda ctx: None)
    assert "order" not in json.loads(codec.encode(open_checkpoint(tmp_path / "none").manifest))["leaves"]
    manifest = open_checkpoint(tmp_path / "run").manifest
    data = codec.encode(manifest)
    assert codec.decode(data) == manifest
    raw = json.loads(data)
    [[order, rows]] = raw["leaves"]["order"]
    assert order == [0, 2, 3, 1]
    for odd in (
        *([[[0, 1], rows]], [[[0, 2, 3, 3], rows]], [[order, [99]]], [[order, rows], [order, rows]]),
        *([[order]], 7, [7], [[[0, 2, 3, 1.0], rows]], [["abcd", rows]], [[[False, 2, 3, True], rows]]),
    ):
        raw["leaves"]["order"] = odd
        with pytest.raises(DamagedError):
            codec.decode(json.dumps(raw).encode())


def test_the_frozen_sample_is_read_and_written_alike() -> None:
    """The manifest of a frozen sample has two transposed matrices."""
    data = (GOLDEN / "manifest_ordered.json").read_bytes()
    manifest = codec.decode(data)
    assert [leaf.order for leaf in manifest.leaves if leaf.order] == [(1, 0), (1, 0)]
    assert codec.encode(manifest) == data
    plain = tuple(leaf._replace(order=None) for leaf in manifest.leaves)
    assert codec.encode(replace(manifest, leaves=plain)) == (GOLDEN / "manifest_learning.json").read_bytes()


def test_the_manifest_says_what_was_laid_otherwise_than_it_was_built(tmp_path: Path) -> None:
    """A column of rows, left out where there are none; odd ones are damage."""
    blobs, step = model_switched_to_channels_last()
    train(tmp_path / "run", 1, lambda: blobs, step)
    manifest = open_checkpoint(tmp_path / "run").manifest
    changed = {leaf.name for leaf in manifest.leaves if leaf.order_changed}
    assert changed == {"model.0.weight", "model.2.weight", "model.patch"}
    data = codec.encode(manifest)
    assert codec.decode(data) == manifest
    raw = json.loads(data)
    for odd in ([99], [[0, 2, 0]], [-1], 7, ["0"]):
        raw["leaves"]["order_changed"] = odd
        with pytest.raises(DamagedError):
            codec.decode(json.dumps(raw).encode())


def test_the_sample_of_changed_orders_is_read_and_written_alike() -> None:
    """One of its two transposed matrices, and one that is transposed no more, were built otherwise."""
    data = (GOLDEN / "manifest_order_changed.json").read_bytes()
    manifest = codec.decode(data)
    assert [leaf.order for leaf in manifest.leaves if leaf.order_changed] == [(1, 0), None]
    assert codec.encode(manifest) == data
    plain = tuple(leaf._replace(order_changed=False) for leaf in manifest.leaves)
    assert codec.encode(replace(manifest, leaves=plain)) == (GOLDEN / "manifest_ordered.json").read_bytes()


@pytest.mark.parametrize("init", [True, False], ids=["init", "epoch"])
def test_what_the_program_builds_otherwise_stays_so(init: bool, tmp_path: Path) -> None:
    """A model that is built channels_last from now on keeps that; one that `init` switched is so again."""
    for epochs, built in ((1, torch.contiguous_format), (2, torch.channels_last)):
        model = nn.Conv2d(3, 4, 2)
        if not init:
            model.to(memory_format=built)
        job = Job("order", blobs={"model": model})

        @job.init
        def switch(ctx: Any, model: nn.Module = model) -> None:
            if init:
                model.to(memory_format=torch.channels_last)

        @job.epoch
        def epoch(ctx: Any) -> None:
            pass

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None).train()
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 1, 2], [1, "0"], None, [0, 5]])
def test_an_array_of_odd_order_is_damage(order: Any) -> None:
    """Not every list of numbers is an order of dimensions."""
    stored = encode(numpy.eye(2, 3).T, "a")
    assert decode(stored).flags.f_contiguous
    with pytest.raises(DamagedError):
        decode({"$": "ordered", "v": [order, stored["v"][1]]})


def test_a_load_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its plan, and the memory that it read into, are gone when it returns, without a garbage collection."""
    blobs, step = model_switched_to_channels_last()
    train(tmp_path / "run", 1, lambda: blobs, step)
    found = model_switched_to_channels_last()[0]
    gc.collect()
    gc.disable()
    try:
        open_checkpoint(tmp_path / "run").load(found)
        assert not [one for one in gc.get_objects() if isinstance(one, RestorePlan)]
    finally:
        gc.enable()
