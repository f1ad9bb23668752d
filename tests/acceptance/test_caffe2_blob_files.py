"""S10 to S13: blobs in files, without a job, with our own save and load options."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from torchrelay import LocalSession, load_blobs, save_blobs
from torchrelay.errors import BlobError, DamagedError, FormatError, StorageError, UsageError

DTYPES = [
    torch.float16, torch.float32, torch.float64, torch.bool, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint8, torch.complex128,
]  # fmt: skip


def ten(shift: int) -> dict[str, torch.Tensor]:
    return {str(dtype)[6:]: (torch.arange(6).reshape(2, 3) + shift).to(dtype) for dtype in DTYPES}


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_s10_ten_dtypes_twice_over(tmp_path: Path) -> None:
    """Ten dtypes of 2x3 come back with dtype and values, listed or all, also after an overwrite."""
    file = tmp_path / "blobs"
    for shift in (0, 1):
        save_blobs(file, ten(shift), overwrite=shift == 1)
        assert alike(load_blobs(file), ten(shift))
        assert alike(load_blobs(file, list(ten(0))), ten(shift))
    assert [path.name for path in tmp_path.iterdir()] == ["blobs"]


def test_s10_any_reader_of_safetensors_opens_the_file(tmp_path: Path) -> None:
    """The file is plain safetensors."""
    save_blobs(tmp_path / "f", {"a": torch.eye(2), "n": 3})
    assert torch.equal(safetensors.torch.load_file(tmp_path / "f")["a"], torch.eye(2))


def test_s11_a_repeated_input_is_refused_at_save(tmp_path: Path) -> None:
    """Two blobs that would be stored under one name are refused, and nothing is written."""
    blobs = {"a": torch.ones(1), "b": torch.ones(1)}
    with pytest.raises(UsageError, match="'a' and 'b' both"):
        save_blobs(tmp_path / "f", blobs, rename={"a": "x", "b": "x"})
    with pytest.raises(UsageError, match="dotted prefix"):
        save_blobs(tmp_path / "f", blobs, rename={"a": "x", "b": "x.y"})
    assert list(tmp_path.iterdir()) == []


def test_s11_a_repeated_output_is_refused_at_load(tmp_path: Path) -> None:
    """A name listed twice, or two names that become one, are refused."""
    save_blobs(tmp_path / "f", {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(UsageError, match="'a' is given twice"):
        load_blobs(tmp_path / "f", ["a", "a"])
    with pytest.raises(UsageError, match="'a' and 'b' both"):
        load_blobs(tmp_path / "f", rename={"a": "x", "b": "x"})
    save_blobs(tmp_path / "g", {"m.a": torch.ones(1), "a": torch.ones(1)})
    with pytest.raises(UsageError, match=r"prefix='m.'"):
        load_blobs(tmp_path / "g", prefix="m.")


@pytest.mark.parametrize("names", [None, ["a"]], ids=["all", "explicit"])
def test_s11_a_truncated_file_is_refused(tmp_path: Path, names: list[str] | None) -> None:
    """Wherever a file is cut, loading raises DamagedError and gives nothing out."""
    file = tmp_path / "f"
    save_blobs(file, {"a": torch.ones(3000), "n": [1, 2]})
    whole = file.read_bytes()
    for size in (0, 5, 4000, 4096, 8000, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(DamagedError):
            load_blobs(file, names)


def test_s11_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """A bit flipped in the header's text, its padding aside, or in the data never loads as something else."""
    file = tmp_path / "f"
    save_blobs(file, {"a": torch.ones(40), "n": {"x": [1, 2.5, None, "text"]}})
    whole = file.read_bytes()
    text_end = len(whole[:4096].rstrip(b" "))
    for at in [*range(text_end), *range(4096, len(whole), 7)]:
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        try:
            found = load_blobs(file)
        except (StorageError, UsageError):
            continue
        # What the file says beside its content (job, node, try) may change without harm.
        assert torch.equal(found["a"], torch.ones(40)) and found["n"] == {"x": [1, 2.5, None, "text"]}, at


def test_s11_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there, a directory, a foreign file and a URL are each told apart."""
    with pytest.raises(UsageError, match="nowhere is not there"):
        load_blobs(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is no file"):
        load_blobs(tmp_path)
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "foreign")
    with pytest.raises((FormatError, DamagedError), match="foreign"):
        load_blobs(tmp_path / "foreign")
    with pytest.raises(UsageError, match="memory://bucket/f does not exist"):
        load_blobs("memory://bucket/f")
    with pytest.raises(UsageError, match="no file: name"):
        load_blobs([])


def test_s11_rename_and_prefix_together_are_refused(tmp_path: Path) -> None:
    """One of the two says it all."""
    save_blobs(tmp_path / "f", {"a": torch.ones(1)})
    with pytest.raises(UsageError, match="rename and prefix"):
        load_blobs(tmp_path / "f", rename={"a": "b"}, prefix="a")


@pytest.mark.parametrize("names", [None, ["b", "a"]], ids=["all", "explicit"])
def test_s11_the_same_blob_in_two_files_is_refused(tmp_path: Path, names: list[str] | None) -> None:
    """Nobody guesses which one is meant; a load that does not want it works."""
    save_blobs(tmp_path / "f", {"a": torch.ones(1), "b": torch.ones(1)})
    save_blobs(tmp_path / "g", {"a": torch.ones(1), "c": torch.ones(1)})
    with pytest.raises(UsageError, match=r"'a' is in .*f and .*g"):
        load_blobs([tmp_path / "f", tmp_path / "g"], names)
    assert set(load_blobs([tmp_path / "f", tmp_path / "g"], ["b", "c"])) == {"b", "c"}


def test_s11_the_same_file_listed_twice_is_refused(tmp_path: Path) -> None:
    """Also by another spelling of its path."""
    save_blobs(tmp_path / "f", {"a": torch.ones(1)})
    with pytest.raises(UsageError, match="given twice"):
        load_blobs([tmp_path / "f", tmp_path / ".." / tmp_path.name / "f"])


def test_s11_a_listed_name_that_is_absent_is_an_error(tmp_path: Path) -> None:
    """Also beside a pattern for everything; `strict=False` leaves it out."""
    save_blobs(tmp_path / "f", {"weight": torch.ones(1)})
    with pytest.raises(UsageError, match=r"'weigth'.*did you mean 'weight'"):
        load_blobs(tmp_path / "f", ["*", "weigth"])
    assert set(load_blobs(tmp_path / "f", ["*", "weigth"], strict=False)) == {"weight"}


def test_s12_renames_at_save_and_load(tmp_path: Path) -> None:
    """a, b, c saved as x, y, z load as exactly these, or x as blob_x; names are meant whole."""
    file = tmp_path / "f"
    blobs = {"a": torch.tensor(1), "b": torch.tensor(2), "c": torch.tensor(3)}
    save_blobs(file, blobs, rename={"a": "x", "b": "y", "c": "z"})
    found = load_blobs(file)
    assert {name: int(value) for name, value in found.items()} == {"x": 1, "y": 2, "z": 3}
    assert list(load_blobs(file, "x", rename={"x": "blob_x"})) == ["blob_x"]
    assert set(load_blobs(file, rename={"x": "p", "y": "q", "z": "r"})) == {"p", "q", "r"}
    save_blobs(tmp_path / "g", {"w": 1, "w2": 2, "deep": torch.nn.Linear(1, 1)}, rename={"w": "weight"})
    assert set(load_blobs(tmp_path / "g")) == {"weight", "w2", "deep.weight", "deep.bias"}


def test_s12_counts_in_a_workspace(tmp_path: Path) -> None:
    """Loaded into a workspace: x, y, z make 3 names, x as blob_x makes 4, three more names 6."""
    file = tmp_path / "f"
    save_blobs(file, {name: torch.ones(1) for name in "xyz"})
    session = LocalSession()
    names = session.workspace().own_names
    session.run(lambda ctx: ctx.load_blobs(file))
    assert set(names()) == {"x", "y", "z"}
    session.run(lambda ctx: ctx.load_blobs(file, "blob_x", rename={"x": "blob_x"}))
    assert len(names()) == 4
    session.run(lambda ctx: ctx.load_blobs(file, ["1", "2"], rename={"x": "1", "y": "2"}))
    assert len(names()) == 6


def test_s13_two_files_load_together(tmp_path: Path) -> None:
    """Files with disjoint names are one set, listed or all."""
    save_blobs(tmp_path / "f", {"a": torch.ones(2), "b": 1})
    save_blobs(tmp_path / "g", {"c": torch.zeros(2), "d": 2})
    both = [tmp_path / "f", tmp_path / "g"]
    assert set(load_blobs(both)) == {"a", "b", "c", "d"}
    found = load_blobs(both, ["d", "a"])
    assert found["d"] == 2 and torch.equal(found["a"], torch.ones(2)) and len(found) == 2


# Beyond the ancestor


def network() -> torch.nn.Module:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    layers[2].weight = torch.nn.Parameter(layers[0].weight.detach().clone().t().contiguous())
    return layers


def test_a_module_comes_back_by_its_state_dict(tmp_path: Path) -> None:
    """`prefix` makes the names those of the module's own state dict."""
    model, other = network(), network()
    save_blobs(tmp_path / "f", {"model": model, "classes": ("cat", "dog")})
    other.load_state_dict(load_blobs(tmp_path / "f", "model", prefix="model."))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert load_blobs(tmp_path / "f", "classes") == {"classes": ("cat", "dog")}


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    """Two names of one tensor take its bytes once, and either name loads alone."""
    tied = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    tied[1].weight = tied[0].weight
    save_blobs(tmp_path / "f", {"m": tied})
    assert (tmp_path / "f").stat().st_size < 1.2 * 512 * 512 * 4
    assert torch.equal(load_blobs(tmp_path / "f", "m.1.weight")["m.1.weight"], tied[0].weight)


def test_dtype_converts_floats_but_no_optimizer(tmp_path: Path) -> None:
    """bfloat16 halves the weights; integers and optimizer state stay what they are."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    blobs = {"m": model, "o": optimizer, "i": torch.arange(3), "nested": {"ema": torch.ones(2)}}
    save_blobs(tmp_path / "f", blobs, dtype=torch.bfloat16)
    found = load_blobs(tmp_path / "f")
    assert found["m.weight"].dtype == found["nested"]["ema"].dtype == torch.bfloat16
    assert found["i"].dtype == torch.int64
    assert found["o.state.m.weight.exp_avg"].dtype == torch.float32
    with pytest.raises(UsageError, match="floating-point"):
        save_blobs(tmp_path / "g", blobs, dtype=torch.int8)


def test_objects_in_a_workspace_are_loaded_in_place(tmp_path: Path) -> None:
    """`ctx.load_blobs` of a file: modules, optimizers and stateful objects in place, the rest made anew."""
    model, optimizer, schedule = training()
    save_blobs(tmp_path / "f", {"net": model, "opt": optimizer, "schedule": schedule, "n": 5})
    target, target_optimizer, target_schedule = training(steps=0)
    weight = target.weight
    session = LocalSession()
    session.workspace().update(net=target, opt=target_optimizer, plan=target_schedule, n=None)
    names = ["net", "opt", "plan", "n"]
    result = session.run(
        lambda ctx: ctx.load_blobs(tmp_path / "f", names, rename={"schedule": "plan"})
    ).fetch()
    assert target.weight is weight and torch.equal(weight, model.weight)
    assert target_schedule.state_dict() == schedule.state_dict()
    assert torch.equal(target_optimizer.state[weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert session.blob("n") == 5 and "net.weight" in result.loaded
    with pytest.raises(Exception, match="no 'head'"):
        session.run(lambda ctx: ctx.load_blobs(tmp_path / "f", "head", rename={"net": "head"}))


def training(steps: int = 2):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def test_nothing_is_replaced_without_overwrite(tmp_path: Path) -> None:
    """A taken name is refused and its file untouched; a directory is never replaced."""
    save_blobs(tmp_path / "f", {"a": 1})
    with pytest.raises(UsageError, match="overwrite=True"):
        save_blobs(tmp_path / "f", {"a": 2})
    assert load_blobs(tmp_path / "f") == {"a": 1}
    (tmp_path / "d").mkdir()
    with pytest.raises(UsageError, match="never replaced"):
        save_blobs(tmp_path / "d", {"a": 2}, overwrite=True)


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    """The message has the path inside the blob; no file appears, not even a temporary one."""
    with pytest.raises(BlobError, match=r"a\.b"):
        save_blobs(tmp_path / "f", {"a": {"b": object()}})
    with pytest.raises(UsageError, match="by name"):
        save_blobs(tmp_path / "f", [torch.ones(1)])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When syncing fails, the error is raised, the old content stays, no temporary file is left."""
    save_blobs(tmp_path / "f", {"a": 1})
    failed = []

    def fail(descriptor: int) -> None:
        failed.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="sync"):
            save_blobs(tmp_path / "f", {"a": 2}, overwrite=True)
    assert failed and load_blobs(tmp_path / "f") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
