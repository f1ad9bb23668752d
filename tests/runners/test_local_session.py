"""LocalSession: nodes, workspaces, what runs, outputs, streams, the end."""

from __future__ import annotations

import queue
import random

import pytest
import torch
import torch.distributed as dist
from own_loops import FACES, Training, nothing

from torchrelay.errors import NotAllowedNowError, TaskFailedError, UsageError
from torchrelay.jobs.cluster import Node
from torchrelay.jobs.job import SessionGroup, TaskGroup
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.task import Task, final_output
from torchrelay.jobs.workspace import Origin, WorkspaceType
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.local import LocalSession
from torchrelay.runners.session.run_state import RunState

GLOBAL, PRIVATE = WorkspaceType.GLOBAL, WorkspaceType.PRIVATE


def test_s2_two_piped_processors_in_one_group_see_the_workspace_of_an_earlier_run():
    """Three records through two concurrent processors: ids doubled, values minus themselves."""
    session = LocalSession()
    session.run(lambda ws: ws.update(uid=[1, 2, 6], value=[1.5, 2.5, 3.5]))
    pipe = queue.Queue()

    def double(ws):
        for uid, value in zip(ws["uid"], ws["value"], strict=True):
            pipe.put((2 * uid, value))
        pipe.put(None)

    def subtract(ws):
        ws["uids"], ws["values"] = [], []
        while (record := pipe.get(timeout=100)) is not None:
            ws["uids"].append(record[0])
            ws["values"].append(record[1] - record[1])

    with TaskGroup() as group:
        Task(double, concurrent=True)
        task = Task(subtract, ["uids", "values"], concurrent=True)
    session.run(group)
    assert [output.fetch() for output in task.outputs] == [[2, 4, 12], [0, 0, 0]]


def test_c8_private_tasks_write_through_and_their_own_names_vanish():
    """A node with a colon; PRIVATE groups update names of the GLOBAL workspace and leave no others."""
    session = LocalSession()
    ones = torch.ones(8)
    with Node("trainer:0"):
        with TaskGroup(GLOBAL) as init:
            Task(lambda ws: ws.update(a=ones, b=ones, output=ones, result=ones))
        with TaskGroup() as epoch:
            Task(lambda ws: ws.update(sum=ws["a"] + ws["b"]))
            Task(lambda ws: ws.update(output=ws["sum"]))
        with TaskGroup() as download:
            Task(lambda ws: ws.update(result=ws["output"].clone()))
    for group in (init, epoch, download):
        session.run(group)
    assert session.blob("trainer:0:output").tolist() == [2.0] * 8
    assert session.blob("result").tolist() == [2.0] * 8
    assert list(session.workspace("trainer:0")) == ["a", "b", "output", "result"]


def test_tasks_of_one_private_run_share_their_new_names_and_the_next_run_does_not():
    """One child workspace per node and run; outputs survive it."""
    with TaskGroup(PRIVATE) as group:
        Task(lambda ws: ws.update(fresh="x" not in ws, x=1))
        Task(lambda ws: ws.update(x=ws["x"] + 1))
        x, fresh = final_output("x"), final_output("fresh")
    session = LocalSession()
    for _ in range(2):
        session.run(group)
        assert (x.fetch(), fresh.fetch()) == (2, True)
    assert list(session.workspace()) == []


def test_outputs_are_what_they_were_at_the_end_of_the_run():
    """Later writes change no fetched value, tensors included; a task that runs again is fetched anew."""
    session = LocalSession()
    session.run(lambda ws: ws.update(total=torch.tensor([100])))
    reader = Task(outputs="total")
    output = reader.outputs[0]
    with pytest.raises(NotAllowedNowError, match="not set yet"):
        output.fetch()
    session.run(reader)
    session.run(lambda ws: ws["total"].add_(3))
    assert output.fetch().item() == 100
    session.run(reader)
    assert output.fetch().item() == 103


def test_an_output_that_no_step_made_is_named():
    """The message has the output, the task and the node."""
    with pytest.raises(UsageError, match="'nothing' of task 'task' does not exist on trainer_0"):
        LocalSession().run(Task(lambda: None, outputs="nothing"))


def test_outputs_of_several_nodes_are_fetched_by_node():
    """Each emulated node has its own value; a bare fetch asks which."""
    session = LocalSession(["trainer_0", "trainer_1"])
    output = session.run(lambda ctx: ctx.rank * 10)
    assert output.fetch_all() == {"trainer_0": 0, "trainer_1": 10}
    assert output.fetch("trainer_1") == 10
    with pytest.raises(UsageError, match="trainer_0, trainer_1"):
        output.fetch()


def test_the_result_of_a_task_with_instances_lists_what_each_returned():
    """In the order of the instances."""
    task = Task(lambda ctx: ctx.instance, num_instances=4)
    LocalSession().run(task)
    assert task.result.fetch() == [0, 1, 2, 3]


def test_nodes_do_not_see_each_other():
    """Every emulated node has its own workspace, that lives as long as the session."""
    session = LocalSession()
    with TaskGroup(GLOBAL) as group:
        Task(lambda ws: ws.update(x=1), node="trainer_0")
        Task(lambda ctx: ctx.workspace.update(y=("x" in ctx, ctx.rank, ctx.world_size)), node="trainer_1")
    session.run(group)
    assert session.blob("trainer_1:y") == (False, 1, 2)
    assert session.blob("x") == 1
    session.place(["trainer_1"])
    assert session.blob("y") == (False, 1, 2)
    with pytest.raises(UsageError, match="'trainer_0' is not in this process, which hosts trainer_1"):
        session.blob("trainer_0:x")


def test_a_name_of_several_nodes_must_say_which():
    """`blob` finds a name wherever it is, if that is one node."""
    session = LocalSession(["a", "b"])
    session.run(lambda ws: ws.update(x=ws.node))
    assert session.blob("b:x") == "b"
    with pytest.raises(UsageError, match="'x' exists on a, b: select one"):
        session.blob("x")
    with pytest.raises(KeyError, match="no 'z'"):
        session.blob("z")


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ([], ["trainer_0"]),
        (["b", "a"], ["b", "a"]),
        (["trainer_1", "trainer_0"], ["trainer_0", "trainer_1"]),
        (["reader", "trainer_0"], ["trainer_0", "reader"]),
        (["trainer_7"], ["trainer_7"]),
    ],
)
def test_declared_nodes_get_ranks(declared, expected):
    """`trainer_<n>` gets rank n where there is one, the others the remaining ranks in their order."""
    session = LocalSession()
    session.place(declared)
    assert [place.name for place in session.nodes] == expected
    assert [place.rank for place in session.nodes] == list(range(len(expected)))
    assert {(place.world_size, place.process) for place in session.nodes} == {(len(expected), 0)}


def test_a_session_with_given_nodes_refuses_others():
    """The message names the node, the nodes there are, and the remedy."""
    session = LocalSession(["a", "b"])
    session.place(["b"])
    assert [place.name for place in session.nodes] == ["a", "b"]
    with pytest.raises(UsageError, match=r"declares node 'c'.*has only a, b.*nodes="):
        session.place(["c"])
    with pytest.raises(UsageError, match="'c', expected one of a, b"):
        session.run(Task(lambda: None, node="c"))


@pytest.mark.parametrize("nodes", [[], "trainer_0", ["a", "a"], ["a/b"], [".."]])
def test_bad_nodes_are_refused(nodes):
    """No nodes, one string, a name twice, names that would be paths."""
    with pytest.raises(UsageError):
        LocalSession(nodes)


def test_names_made_before_the_first_epoch_are_marked_as_state():
    """On a placed node they are INIT_PLACED, on all nodes INIT_ALL, and later names LATER."""
    session = LocalSession()
    with TaskGroup(GLOBAL) as init:
        Task(lambda ws: ws.update(placed=1), node="trainer_0")
        Task(lambda ws: ws.update(everywhere=1))
        Task(lambda ws: ws.update(rank0=1), on="rank0")
    session.run(init)
    session.run_state.begin_epoch(1)
    session.run(lambda ws: ws.update(later=1))
    origins = {name: entry.origin for name, entry in session.workspace().entries().items()}
    assert origins == {
        "placed": Origin.INIT_PLACED,
        "everywhere": Origin.INIT_ALL,
        "rank0": Origin.INIT_PLACED,
        "later": Origin.LATER,
    }


def test_session_groups_run_their_action_once_per_process():
    """Their result is handed through."""
    session = LocalSession(["a", "b"])
    assert session.run(SessionGroup("count", lambda s: len(s.nodes))) == 2


def test_an_empty_group_is_legal_and_others_are_frozen_by_their_run():
    """Nothing happens; a group that ran takes no more tasks."""
    session, group = LocalSession(), TaskGroup()
    session.run(TaskGroup())
    session.run(group)
    with pytest.raises(NotAllowedNowError, match="already run"):
        Task(lambda: None, group=group)


@pytest.mark.parametrize("work", [None, 3, "train", [lambda: None]])
def test_what_cannot_run_is_refused(work):
    """A session runs groups, tasks and functions."""
    with pytest.raises(UsageError, match="a session cannot run"):
        LocalSession().run(work)


def test_a_step_takes_nothing_a_workspace_or_a_context():
    """By the name of its parameter; ctx reads and writes the same workspace."""
    session = LocalSession()
    session.run(lambda ws: ws.update(x=1))

    def add(ctx):
        assert "x" in ctx
        ctx["x"] += 1

    session.run(add)
    assert session.run(lambda workspace: workspace["x"]).fetch() == 2
    assert session.run(lambda: 7).fetch() == 7


def test_a_closed_session_says_so_and_closing_twice_is_fine():
    """`with` makes a session current and closes it, whatever ended the block."""
    with pytest.raises(TaskFailedError), LocalSession() as session:
        assert SessionBase.current() is session
        assert LocalSession.current() is session
        session.run(lambda: 1 / 0)
    assert SessionBase.current(required=False) is None
    session.close()
    for use in (lambda: session.run(TaskGroup()), session.workspace, lambda: session.begin(RunState())):
        with pytest.raises(NotAllowedNowError, match="closed"):
            use()


def test_one_train_at_a_time():
    """A second run in one session is refused until the first has ended."""
    session = LocalSession()
    state = RunState(seed=3, attempt=1, run_dir="runs/x")
    session.begin(state)
    with pytest.raises(NotAllowedNowError, match="already training"):
        session.begin(RunState())
    told = session.run(lambda ctx: (ctx.seed, ctx.attempt, ctx.run_dir, ctx.epoch, ctx.group)).fetch()
    assert told == (3, 1, "runs/x", 0, None)
    session.end()
    session.begin(RunState())


def draw(_=None):
    return random.random(), torch.rand(()).item()


def test_streams_of_emulated_nodes_do_not_depend_on_each_other_s_draws():
    """However much one node draws, the other's numbers are the same; the process's stream is untouched."""

    def numbers(draws_of_a):
        session = LocalSession(["a", "b"])
        for rank, name in enumerate("ab"):
            session.set_streams(name, RandomStreams.derive(0, rank))
        got = []

        def step(ctx):
            got.extend((ctx.node, draw()) for _ in range(draws_of_a if ctx.node == "a" else 2))

        before = RandomStreams.capture()
        session.run(step)
        session.run(step)
        assert RandomStreams.capture() == before
        return [drawn for node, drawn in got if node == "b"], got[0]

    few, first = numbers(1)
    many, same_first = numbers(50)
    assert few == many
    assert len(set(few)) == 4
    assert first == same_first
    assert first[1] not in few


def test_the_streams_of_a_single_node_are_those_of_the_process():
    """What set_streams gives continues in the program, and nothing is swapped."""
    session = LocalSession()
    session.set_streams("trainer_0", RandomStreams.derive(5, 0))
    state = session.streams("trainer_0")
    drawn = session.run(draw).fetch()
    state.restore()
    assert draw() == drawn


def test_streams_of_a_node_are_read_and_set_while_it_runs():
    """Inside its own run, `streams` is the state of now."""
    session = LocalSession(["a", "b"])

    def step(ctx):
        kept = ctx.session.streams(ctx.node)
        drawn = draw()
        ctx.session.set_streams(ctx.node, kept)
        return drawn == draw()

    assert session.run(step).fetch_all() == {"a": True, "b": True}


def test_before_mutation_asks_the_gate_of_the_workspace():
    """A save that is still copying holds writers there."""
    session, asked = LocalSession(), []
    session.workspace().gate = lambda: asked.append(1)
    session.run(lambda ctx: ctx.before_mutation())
    assert asked == [1]


@pytest.mark.parametrize("face", FACES)
def test_ranks_that_the_environment_does_not_name_are_refused(face, tmp_path):
    """As under mp.spawn: each would be a run of its own in the same directory."""
    dist.init_process_group("fake", rank=1, world_size=2)
    try:
        with pytest.raises(UsageError, match=r"rank 1 of 2, but .* start with torchrun, not mp\.spawn"):
            FACES[face](Training(), tmp_path, nothing)
    finally:
        dist.destroy_process_group()
    assert not list(tmp_path.iterdir())
