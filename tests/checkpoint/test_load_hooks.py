"""Load hooks of modules run before names and shapes are compared, in every way to load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from leaf_store import load, save
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchrelay import Job, JobRunner, load_into, max_epochs, open_checkpoint, save_blobs
from torchrelay.errors import BlobError


class Old(nn.Module):
    """The module as it was saved: other names, one matrix less joined, a buffer that went."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.q, self.k = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("unused", torch.zeros(3))


class Base(nn.Module):
    """The module today."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 2)
        self.qk = nn.Linear(2, 4, bias=False)
        self.norm = nn.BatchNorm1d(2)


def migrate(state: dict[str, Any], prefix: str) -> None:
    """The old form into that of today, in place."""
    for key in [key for key in state if key.startswith(f"{prefix}body.")]:
        state[f"{prefix}trunk.{key[len(prefix) + len('body.') :]}"] = state.pop(key)
    if f"{prefix}q.weight" in state:
        pair = (state.pop(f"{prefix}q.weight"), state.pop(f"{prefix}k.weight"))
        state[f"{prefix}qk.weight"] = torch.cat(pair)
    state.pop(f"{prefix}unused", None)


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: migrate(state, prefix))


class Overriding(Base):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        migrate(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Loading(Base):
    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        state = dict(state_dict)
        migrate(state, "")
        return super().load_state_dict(state, *args, **options)


KINDS: dict[str, Callable[[], Any]] = {
    "hook": Hooked,
    "override": Overriding,
    "load_state_dict": Loading,
    "compiled": lambda: torch.compile(Hooked(), backend="eager"),
}


def check(module: Any, old: Old) -> None:
    module = getattr(module, "_orig_mod", module)
    assert torch.equal(module.trunk.weight, old.body.weight) and torch.equal(module.trunk.bias, old.body.bias)
    assert torch.equal(module.qk.weight, torch.cat([old.q.weight, old.k.weight]))
    assert torch.equal(module.norm.running_mean, old.norm.running_mean)


def old_module() -> Old:
    old = Old()
    old.norm.running_mean += 1  # type: ignore[operator]
    return old


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["load", "load_into"])
def test_hooks_that_know_the_old_form_load_it(tmp_path: Path, kind: str, way: str) -> None:
    """Entries that a hook renames, joins or drops are neither missing nor unexpected."""
    old = old_module()
    module = KINDS[kind]()
    if way == "load_into":
        save_blobs(tmp_path / "blobs", {"m": old})
        load_into(tmp_path / "blobs", {"m": module})
    else:
        load(save({"m": old}), {"m": module})
    check(module, old)
    again = save({"m": module})
    load(again, {"m": KINDS[kind]()})


@pytest.mark.parametrize(
    "wrap", [nn.Sequential, nn.DataParallel, lambda one: nn.Sequential(checkpoint_wrapper(one))]
)
def test_hooks_of_parts_and_below_wrappers_run_too(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    """A hook sees the keys that its part has, whatever is around it now and was around it then."""
    old, inner = old_module(), Hooked()
    around = nn.DataParallel if wrap is nn.DataParallel else nn.Sequential
    save_blobs(tmp_path / "blobs", {"m": around(old)})
    load_into(tmp_path / "blobs", {"m": wrap(inner)})
    check(inner, old)


def run(module: Any, where: Path, epochs: int, optimizer: Any = None) -> None:
    blobs = {"opt": optimizer, "m": module} if optimizer else {"m": module}
    job = Job("hooks", blobs=blobs)
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(epochs))
    JobRunner(job, where, best=None).train()


@pytest.mark.parametrize("kind", ["hook", "override"])
def test_a_run_resumes_with_a_module_of_today(tmp_path: Path, kind: str) -> None:
    """A resume loads the old form through the hooks, and saves the new one from then on."""
    old = old_module()
    run(old, tmp_path / "run", 1)
    module = KINDS[kind]()
    run(module, tmp_path / "run", 2)
    check(module, old)
    names = {leaf.name for leaf in open_checkpoint(tmp_path / "run").leaves}
    assert "m.trunk.weight" in names and "m.body.weight" not in names
    again = KINDS[kind]()
    run(again, tmp_path / "run", 3)
    check(again, old)


class OldNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)


class NewNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: migrate(state, prefix))


def test_an_optimizer_follows_parameters_that_a_hook_renames(tmp_path: Path) -> None:
    """The state of a renamed parameter is found by the name that it had."""
    old = OldNamed()
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1, momentum=0.9)
    for parameter in old.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    run(old, tmp_path / "run", 1, optimizer)
    new = NewNamed()
    fresh = torch.optim.SGD(new.parameters(), lr=0.2, momentum=0.9)
    run(new, tmp_path / "run", 2, fresh)
    assert torch.equal(new.trunk.weight, old.body.weight)
    assert all(torch.equal(one["momentum_buffer"], torch.ones_like(p)) for p, one in fresh.state.items())
    assert fresh.param_groups[0]["lr"] == 0.1


def test_what_hooks_do_not_know_is_still_refused(tmp_path: Path) -> None:
    """The strict comparison is made after the hooks: what they leave over is named, and nothing changes."""

    class Other(Old):
        def __init__(self) -> None:
            super().__init__()
            self.strange = nn.Linear(1, 1)

    save_blobs(tmp_path / "blobs", {"m": Other()})
    module = Hooked()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(BlobError, match=r"only in the checkpoint: m\.strange\.weight"):
        load_into(tmp_path / "blobs", {"m": module})

    class Without(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

    save_blobs(tmp_path / "less", {"m": Without()})
    with pytest.raises(BlobError, match=r"not in the checkpoint: m\.qk\.weight"):
        load_into(tmp_path / "less", {"m": module})

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 2)
            self.qk, self.norm = nn.Linear(2, 4, bias=False), nn.BatchNorm1d(2)

    save_blobs(tmp_path / "wide", {"m": Wide()})
    with pytest.raises(BlobError, match=r"size mismatch for trunk\.weight"):
        load_into(tmp_path / "wide", {"m": module})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert "set_extra_state" not in vars(module) and not module._load_state_dict_post_hooks


def test_hooks_that_want_to_see_content_are_not_asked_beforehand(tmp_path: Path) -> None:
    """Such a hook cannot be rehearsed: the names are compared as they are, and nothing changes."""

    class Looking(Base):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            assert state_dict[f"{prefix}body.weight"].sum().item() is not None
            migrate(state_dict, prefix)
            super()._load_from_state_dict(state_dict, prefix, *args)

    save_blobs(tmp_path / "blobs", {"m": Old()})
    module = Looking()
    with pytest.raises(BlobError, match=r"not in the checkpoint: m\.trunk\.weight"):
        load_into(tmp_path / "blobs", {"m": module})
    assert all(not one.is_meta for one in module.parameters())


class Extra(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: WithExtra()})
        self.name = name

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if ".old." in key]:
            state_dict[key.replace(".old.", ".new.")] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.zeros(2)), 0

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def test_extra_state_under_an_old_name_is_set_once_all_is_read(tmp_path: Path) -> None:
    """Renamed extra state reaches its module, and not before the load."""
    source, target = Extra("old"), Extra("new")
    part: Any = source.inner["old"]
    part.extra = 7
    part.weight.data.fill_(3)
    save_blobs(tmp_path / "blobs", {"m": source})
    load_into(tmp_path / "blobs", {"m": target})
    found: Any = target.inner["new"]
    assert found.extra == 7 and found.weight.tolist() == [3.0, 3.0]
