"""Task groups."""

import pytest

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.cluster import Node
from torchrelay.jobs.job import SessionGroup, TaskGroup
from torchrelay.jobs.task import Task
from torchrelay.jobs.workspace import WorkspaceType


def work():
    pass


def test_duplicate_names_get_numbers():
    """Tasks of one full name in one group are told apart by :1, :2."""
    with TaskGroup() as group:
        for node in ("a", "a", "b", "a"):
            Task(work, node=node)
    assert [t.full_name for t in group.tasks()] == ["a/work", "a/work:1", "b/work", "a/work:2"]


def test_nodes_come_in_order_of_first_use():
    """`used_nodes` lists each placed node once; tasks for every node name none."""
    with TaskGroup() as group:
        for node in ("b", None, "a", "b"):
            Task(work, node=node)
    assert group.used_nodes() == ("b", "a")
    assert group.num_registered_tasks() == 4


def test_tasks_of_a_node_keep_the_order_of_declaration():
    """A node gets its own tasks and those for every node, in their order."""
    with TaskGroup() as group:
        tasks = [Task(work, node=node) for node in ("a", None, "b", "a")]
    assert group.tasks_by_node(["a", "b", "c"]) == {
        "a": [tasks[0], tasks[1], tasks[3]],
        "b": [tasks[1], tasks[2]],
        "c": [tasks[1]],
    }
    with pytest.raises(UsageError, match="'b/work' of 'group' is placed on node 'b', expected one of a"):
        group.tasks_by_node(["a"])


def test_the_first_type_is_adopted_and_mixing_is_an_error():
    """A group without a type takes that of its first task that has one; without any it is PRIVATE."""
    with TaskGroup() as group:
        Task(work)
        assert group.workspace_type is WorkspaceType.PRIVATE
        Task(work, workspace_type="global")
        assert group.workspace_type is WorkspaceType.GLOBAL
        with pytest.raises(UsageError, match="wants a private workspace"):
            Task(work, workspace_type="private")
    assert group.num_registered_tasks() == 2
    with pytest.raises(UsageError, match="wants a private"):
        Task(work, group=TaskGroup("global"), workspace_type="private")


def test_a_used_group_takes_nothing_more():
    """After the first run, tasks, report steps and hooks are refused, and its tasks are fixed too."""
    with TaskGroup(name="epoch") as group:
        task = Task(work)
    group.freeze()
    for change in (
        lambda: Task(work, group=group),
        lambda: group.report_step(work),
        lambda: group.local_init(work),
        lambda: group.local_exit(work),
        lambda: task.step(work),
    ):
        with pytest.raises(NotAllowedNowError, match="already run"):
            change()
    assert group.tasks() == (task,)


def test_report_steps_and_hooks_belong_to_the_current_or_given_node():
    """Each keeps its node and, for reports, the seconds between calls."""
    group = TaskGroup()
    with Node("a"):
        group.report_step(work)
        group.local_init(work)
    group.report_step(work, node="b", interval=5)
    group.local_exit(work)
    assert [(r.node, r.interval) for r in group.reporters] == [("a", 1.0), ("b", 5.0)]
    assert group.local_inits[0].node == "a"
    assert group.local_exits[0].node is None
    for interval in (0, -1, float("nan"), float("inf"), "1"):
        with pytest.raises(UsageError, match="seconds above 0"):
            group.report_step(work, interval=interval)


def test_a_report_step_needs_a_task_on_its_node():
    """A report on a node where nothing runs is a problem of the group."""
    group = TaskGroup(name="epoch")
    group.report_step(work, node="b")
    Task(work, node="a", group=group)
    assert group.problems() == ["group 'epoch' has a report step or hook on 'b', but no task there"]
    Task(work, group=group)
    assert group.problems() == []


def test_a_session_group_is_one_call():
    """Saves and loads are an action that takes the session."""
    assert SessionGroup("save", lambda session: session).action(3) == 3
