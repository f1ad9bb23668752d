"""Workspaces: the named state of a node."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import Blob
from torchrelay.jobs.workspace import Origin, Workspace

NAMES = st.sampled_from(["a", "b", "c", "d"])
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 2), NAMES, st.integers()),
        st.tuples(st.just("delete"), st.integers(0, 2), NAMES, st.none()),
        st.tuples(st.just("leave"), st.none(), st.none(), st.none()),
        st.tuples(st.just("enter"), st.none(), st.none(), st.none()),
    ),
    max_size=40,
)


class Nested:
    """The model: a list of dicts; a name belongs to the innermost one that has it."""

    def __init__(self):
        self.levels = [{}]

    def owner(self, level, name):
        return next((d for d in reversed(self.levels[: level + 1]) if name in d), None)

    def seen(self, level):
        return {name: value for d in self.levels[: level + 1] for name, value in d.items()}


@given(MOVES)
@settings(deadline=None, max_examples=200)
def test_workspaces_behave_like_nested_dicts(moves):
    """Reads and writes go to the innermost workspace that has the name; own names vanish with it."""
    model, real = Nested(), [Workspace()]
    for move, wanted, name, value in moves:
        level = min(wanted or 0, len(real) - 1)
        if move == "enter":
            model.levels.append({})
            real.append(real[-1].child())
        elif move == "leave" and len(real) > 1:
            model.levels.pop()
            real.pop()
        elif move == "set":
            owner = model.owner(level, name)
            (model.levels[level] if owner is None else owner)[name] = value
            real[level][name] = value
        elif move == "delete":
            owner = model.owner(level, name)
            if owner is None:
                with pytest.raises(KeyError):
                    del real[level][name]
            else:
                del owner[name], real[level][name]
        for index, workspace in enumerate(real):
            # A name made above after it was made below is hidden by the inner one in both.
            assert dict(workspace.items()) == model.seen(index)
            assert len(workspace) == len(model.seen(index))
            assert set(workspace.own_names()) == set(model.levels[index])


def test_a_private_workspace_updates_what_exists_and_takes_the_rest_with_it():
    """An epoch task updates persistent names in place, while its temporaries vanish."""
    ws = Workspace("trainer_3")
    ws["total"] = 100
    private = ws.child()
    private.update(total=103, temporary=1)
    assert private["temporary"] == 1
    assert dict(ws) == {"total": 103}
    assert private.node == "trainer_3"
    assert private.own_names() == ("temporary",)


def test_a_missing_name_is_answered_with_the_nearest_ones():
    """The KeyError says which node was asked and what the user may have meant."""
    ws = Workspace("trainer_1")
    ws.update(model=1, total=2)
    with pytest.raises(KeyError, match="no 'modle' in the workspace of trainer_1; the nearest are 'model'"):
        ws["modle"]
    assert ws.get("modle") is None
    assert ws.get("modle", 5) == 5
    assert "modle" not in ws
    assert ws.setdefault("total", 7) == 2
    assert ws.setdefault("new", 7) == ws["new"] == 7


def test_assigning_to_a_registered_tensor_copies_into_it():
    """Closures over a registered tensor see what was assigned, from a private workspace too."""
    ws, tensor = Workspace(), torch.zeros(3, requires_grad=True)
    ws.register(Blob("w", tensor), tensor)
    ws.child()["w"] = torch.ones(3)
    assert ws["w"] is tensor
    assert tensor.tolist() == [1, 1, 1]
    with torch.no_grad():
        ws["w"] += 1
    assert tensor.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("value", "remedy"),
    [(torch.ones(2), "convert"), (torch.ones(3, dtype=torch.float64), "convert"), (1.0, "fill_")],
)
def test_a_registered_tensor_takes_only_its_like(value, remedy):
    """Another shape, dtype or kind is refused with the remedy and changes nothing."""
    ws, tensor = Workspace(), torch.zeros(3)
    ws.register(Blob("w", tensor), tensor)
    with pytest.raises(UsageError, match=remedy):
        ws["w"] = value
    assert ws["w"] is tensor
    assert tensor.tolist() == [0, 0, 0]


def test_a_registered_module_cannot_be_replaced_or_deleted():
    """Others hold the module too, so only the same object may be assigned."""
    ws, model = Workspace(), torch.nn.Linear(1, 1)
    ws.register(Blob("model", model), model)
    ws["model"] = model
    with pytest.raises(UsageError, match="cannot be replaced"):
        ws["model"] = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="cannot be deleted"):
        del ws.child()["model"]
    assert ws["model"] is model


def test_registered_plain_values_are_replaced_and_stay_registered():
    """`ctx["best"] = 0.7` keeps the name registered."""
    ws, blob = Workspace(), Blob("best", 0.0)
    ws.register(blob, 0.0)
    ws["best"] = 0.7
    entry = ws.entries()["best"]
    assert (entry.value, entry.origin, entry.blob) == (0.7, Origin.REGISTERED, blob)


def test_a_name_is_registered_for_the_declaration_that_it_came_from():
    """Another job's blob of the same name does not count, so a second start binds its own."""
    ws, blob = Workspace(), Blob("best", 0.0)
    assert not ws.registered(blob)
    ws.register(blob, 0.0)
    ws["best"] = 0.7
    assert ws.registered(blob)
    assert not ws.registered(Blob("best", 0.0))


def test_names_keep_the_origin_in_which_they_were_created():
    """`creating` marks only names created meanwhile, and writes later do not change it."""
    ws = Workspace()
    with ws.creating(Origin.INIT_PLACED):
        ws["placed"] = 1
        with ws.creating(Origin.INIT_ALL):
            ws["everywhere"] = 1
            ws["placed"] = 2
    ws["placed"] = 3
    ws["later"] = 1
    ws.set_loaded("placed", 4)
    ws.child().set_loaded("loaded", 5)
    ws.set_loaded("later", 6)
    assert {name: (e.value, e.origin) for name, e in ws.entries().items()} == {
        "placed": (4, Origin.INIT_PLACED),
        "everywhere": (1, Origin.INIT_ALL),
        "later": (6, Origin.LOADED),
        "loaded": (5, Origin.LOADED),
    }


def test_loading_into_a_registered_tensor_copies_too():
    """What a checkpoint brings follows the rules of assignment for registered names."""
    ws, tensor = Workspace(), torch.zeros(2)
    ws.register(Blob("w", tensor), tensor)
    ws.set_loaded("w", torch.ones(2))
    assert tensor.tolist() == [1, 1]
    assert ws.entries()["w"].origin is Origin.REGISTERED


def test_every_write_passes_the_gate_before_anything_changes():
    """Assigning, copying, registering, loading and deleting each ask the gate first; reading does not."""
    ws, tensor = Workspace(), torch.zeros(1)
    ws.register(Blob("w", tensor), tensor)
    seen = []
    ws.gate = lambda: seen.append((float(tensor), sorted(ws)))
    private = ws.child()
    ws["a"] = 1
    private["a"] = 2
    private["w"] = torch.ones(1)
    ws.register(Blob("b", 0), 0)
    ws.set_loaded("c", 0)
    del ws["a"]
    private["own"] = 1  # no save reads it
    assert ws["b"] == 0
    assert seen == [
        (0.0, ["w"]),
        (0.0, ["a", "w"]),
        (0.0, ["a", "w"]),
        (1.0, ["a", "w"]),
        (1.0, ["a", "b", "w"]),
        (1.0, ["a", "b", "c", "w"]),
    ]


def test_bad_names_are_refused_when_written():
    """A workspace holds only names that a checkpoint can address."""
    with pytest.raises(UsageError, match="name of a blob"):
        Workspace()["a:b"] = 1


def test_threads_may_write_at_the_same_time():
    """Names of many threads all arrive, while another thread walks over the workspace."""
    ws = Workspace()
    start = threading.Barrier(9, timeout=100)

    def write(index):
        start.wait()
        for number in range(200):
            ws[f"n{index}_{number}"] = number

    def walk():
        start.wait()
        for _ in range(50):
            list(ws.child())

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    threads.append(threading.Thread(target=walk))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(ws) == 1600


def test_workspaces_compare_by_identity():
    """Comparing workspaces never compares tensors."""
    a, b = Workspace(), Workspace()
    a["x"] = b["x"] = torch.ones(2)
    assert a == a
    assert a != b
    assert len({a, b}) == 2
