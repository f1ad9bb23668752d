"""Tasks and their outputs."""

import pytest
import torch

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.blobs import invoke
from torchrelay.jobs.cluster import Node
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.task import Task, final_output
from torchrelay.jobs.workspace import Workspace, WorkspaceType


def add_one(ws):
    ws["n"] += 1


def test_a_task_joins_the_current_group_and_node():
    """Inside `with` blocks a task needs no group and no node; given ones win."""
    other = TaskGroup()
    with TaskGroup() as group, Node("trainer_1"):
        here = Task(add_one)
        there = Task(add_one, node="trainer_2", group=other)
    free = Task(add_one)
    assert group.tasks() == (here,)
    assert other.tasks() == (there,)
    assert (here.node, there.node, free.node) == ("trainer_1", "trainer_2", None)
    assert (here.full_name, there.full_name, free.full_name) == (
        "trainer_1/add_one",
        "trainer_2/add_one",
        "add_one",
    )


def test_tasks_are_named_after_their_step_else_task():
    """A lambda gives no name, an explicit name wins."""
    assert Task(lambda: 0).name == Task().name == "task"
    assert Task(add_one, name="plus").name == "plus"


def test_s6_the_same_step_added_twice_runs_twice():
    """A task with one function added twice brings 0 to 2, however it was added."""
    as_list = Task([add_one, add_one])
    as_context = Task()
    with as_context as task:
        task.step(add_one)

        @task.step
        def again(ws):
            add_one(ws)

    for task in (as_list, as_context):
        ws = Workspace()
        ws["n"] = 0
        for step in task.steps:
            invoke(step, ws, None)
        assert ws["n"] == 2


def test_hooks_keep_their_order():
    """Several init and exit steps are kept in the order in which they were given."""
    first, second = (lambda: 1), (lambda: 2)
    task = Task(task_init=[first, second], task_exit=(second, first), instance_init=first, instance_exit=None)
    assert task.task_init == [first, second]
    assert task.task_exit == [second, first]
    assert task.instance_init == [first]
    assert task.instance_exit == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": "somewhere"}, "is invalid: expected"),
        ({"every": 0}, "every=0"),
        ({"num_instances": 1.5}, "num_instances=1.5"),
        ({"num_instances": True}, "num_instances=True"),
        ({"step": lambda a, b: 0}, "functools.partial"),
        ({"task_exit": [3]}, "not a step"),
        ({"node": "../x"}, "name of a node"),
        ({"outputs": ["a:b"]}, "name of a blob"),
        ({"workspace_type": "shared"}, "'global' or 'private'"),
    ],
)
def test_bad_arguments_are_refused_and_leave_no_task(arguments, message):
    """A task that cannot be is refused at once and does not join its group."""
    group = TaskGroup()
    with pytest.raises(UsageError, match=message):
        Task(group=group, **arguments)
    assert group.num_registered_tasks() == 0


def test_a_used_task_does_not_change():
    """After the first use, steps and outputs are fixed."""
    task = Task(add_one)
    task.freeze()
    with pytest.raises(NotAllowedNowError, match="'add_one' has already run"):
        task.step(add_one)
    with pytest.raises(NotAllowedNowError, match="already run"):
        task.add_output("n")


def test_an_output_is_set_by_a_run_and_only_by_a_run():
    """Before a run there is an error; afterwards the value stays, whatever happens in place."""
    task = Task(outputs="total")
    output, total = task.outputs[0], torch.tensor([100])
    with pytest.raises(NotAllowedNowError, match="'total' of task 'task' is not set yet"):
        output.fetch()
    history = {"losses": [total], "pair": (total, "x")}
    output.bind({"trainer_0": total})
    task.result.bind({"trainer_0": history})
    total += 3
    history["losses"].clear()
    assert output.fetch().tolist() == [100]
    assert task.result.fetch()["losses"][0].tolist() == [100]
    assert task.result.fetch()["pair"][0].tolist() == [100]


def test_an_output_of_several_nodes_needs_to_be_told_which():
    """`fetch()` names the nodes where there are several, and `fetch_all` gives all."""
    output = Task(outputs=["total"], name="sum").outputs[0]
    output.bind({"trainer_0": 1, "trainer_1": 2})
    assert output.fetch("trainer_1") == output.fetch(Node("trainer_1")) == 2
    assert output.fetch_all() == {"trainer_0": 1, "trainer_1": 2}
    with pytest.raises(UsageError, match=r"exists on trainer_0, trainer_1: use fetch\(node\)"):
        output.fetch()
    with pytest.raises(UsageError, match="not on 'trainer_9'"):
        output.fetch("trainer_9")
    output.bind({})
    with pytest.raises(NotAllowedNowError, match="selected no node"):
        output.fetch()


def test_final_output_belongs_to_the_current_task_or_to_one_of_its_own():
    """Outside a task a new task without steps holds the output."""
    with TaskGroup() as group, Task(add_one) as task:
        inside = final_output("n")
    with group, Node("trainer_0"):
        outside = final_output("n")
    assert inside.task is task
    assert [t.full_name for t in group.tasks()] == ["add_one", "trainer_0/final_output"]
    assert outside.task.steps == []


def test_a_task_may_say_its_type_of_workspace_by_name():
    """Types are accepted as themselves or as their value."""
    assert Task(workspace_type="global").workspace_type is WorkspaceType.GLOBAL
    assert Task().workspace_type is None
