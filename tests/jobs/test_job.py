"""Jobs: declaring, checking and fixing them."""

import pytest
import torch

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.cluster import Node
from torchrelay.jobs.job import Job, TaskGroup
from torchrelay.jobs.stop import max_epochs
from torchrelay.jobs.task import Task
from torchrelay.jobs.workspace import WorkspaceType


def work():
    pass


def test_both_faces_declare_the_same_tasks():
    """A decorator does nothing that the primitives cannot."""
    decorated = Job("a")
    decorated.setup(work)
    decorated.init(on="rank0")(work)
    decorated.epoch(on=[1, 2], every=2)(work)
    decorated.download()(work)
    decorated.exit(on_failure=True)(work)
    plain = Job("b")
    Task(work, group=plain.setup_group)
    Task(work, group=plain.init_group, on="rank0")
    Task(work, group=plain.epoch_group, on=[1, 2], every=2)
    Task(work, group=plain.download_group)
    Task(work, group=plain.exit_group, on_failure=True)

    def described(job):
        return {
            name: [(t.full_name, t.steps, t.on, t.every, t.on_failure) for t in group.tasks()]
            for name, group in job.groups.items()
        }

    assert described(decorated) == described(plain)
    assert all(len(tasks) == 1 for tasks in described(plain).values())


def test_decorators_return_the_function():
    """A decorated function stays what it was, plain or called."""
    job = Job()
    assert job.epoch(work) is work
    assert job.exit(on="rank0")(work) is work


def test_a_job_in_a_with_block_collects_tasks_into_its_groups():
    """Plain tasks join the epoch group, `with job.init_group` redirects, builders find the job."""

    def builder():
        with Job.current().exit_group:
            return Task(work)

    with Job() as job, Node("trainer_0"):
        with job.init_group:
            init = Task(work)
        epoch = Task(work)
        last = builder()
    assert job.init_group.tasks() == (init,)
    assert job.epoch_group.tasks() == (epoch,)
    assert job.exit_group.tasks() == (last,)
    assert Job.current(required=False) is None
    assert TaskGroup.current(required=False) is None


def test_setup_and_init_are_global_the_rest_private():
    """Names that an epoch task creates vanish; those of setup and init stay."""
    types = {name: group.workspace_type for name, group in Job().groups.items()}
    assert [name for name, kind in types.items() if kind is WorkspaceType.GLOBAL] == ["setup", "init"]


def test_nodes_are_those_of_init_first():
    """Declared nodes come in the order of first use, and the init group's are checkpointed."""
    with Job() as job:
        Task(work, node="c")
        with job.init_group:
            Task(work, node="b")
            Task(work, node="a")
        with job.setup_group:
            Task(work, node="d")
    assert job.nodes() == ("b", "a", "d", "c")
    assert job.nodes_to_checkpoint() == ("b", "a")
    assert Job(nodes_to_checkpoint=["x", Node("y")]).nodes_to_checkpoint() == ("x", "y")
    assert Job().nodes_to_checkpoint() == ()


def test_check_lists_everything_at_once():
    """One error numbers all that keeps the job from running."""
    job = Job("hello", nodes_to_checkpoint=[])
    job.exit_group.report_step(work, node="b")
    with pytest.raises(UsageError) as caught:
        job.check()
    message = str(caught.value)
    assert message.startswith("job 'hello' cannot run: (1) ")
    for part in (
        "no task: add one",
        "no stop condition",
        "nodes_to_checkpoint is empty",
        "on 'b', but no task",
    ):
        assert part in message


def test_duplicate_and_bad_nodes_to_checkpoint_are_refused():
    """A node is saved once; a bad name is refused at once."""
    job = Job(nodes_to_checkpoint=["a", "b", "a"])
    with pytest.raises(UsageError, match="has a more than once"):
        job.check()
    with pytest.raises(UsageError, match="name of a node"):
        Job(nodes_to_checkpoint=["../a"])
    with pytest.raises(UsageError, match="expected a list"):
        Job(nodes_to_checkpoint="trainer_0")


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 256, 3])
def test_bad_job_names_are_refused(name):
    """The name of a job is printable text of at most 255 bytes."""
    with pytest.raises(UsageError, match="name of a job"):
        Job(name)


def test_compile_validates_and_fixes_and_does_so_once():
    """A compiled job takes no task and no stop condition, and compiling it again changes nothing."""
    job = Job("hello")
    with pytest.raises(UsageError, match="cannot run"):
        job.compile()
    job.epoch(work)
    job.stop_when(max_epochs(1))
    assert job.compile() is job.compile(object) is job
    with pytest.raises(NotAllowedNowError, match="already run"):
        job.epoch(work)
    with pytest.raises(NotAllowedNowError, match="already run"):
        job.stop_when(max_epochs(2))
    assert len(job.stop_conditions) == 1


def test_a_stop_condition_of_a_wrong_type_is_refused_at_once():
    """What cannot say "stop" is refused where it is added."""
    job = Job()
    with pytest.raises(UsageError):
        job.stop_when(3.5)
    assert job.stop_conditions == []


def test_blobs_are_added_by_call_and_read_by_iteration():
    """`blobs=` and `job.blobs(...)` fill one registry."""
    job = Job("hello", blobs={"model": torch.nn.Linear(1, 1)})
    job.blobs(best=0.0, scope="replicated")
    assert [blob.name for blob in job.blobs] == ["model", "best"]


def test_injected_groups_are_used():
    """A group that is given to the constructor is the job's."""
    group = TaskGroup(name="mine")
    job = Job(epoch_group=group)
    job.epoch(work)
    assert group.num_registered_tasks() == 1
