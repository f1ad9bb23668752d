"""data_parallel: DDP whose sums are the same after a restart."""

import json
from pathlib import Path

import pytest
from torch import nn
from torchrun import torchrun

from torchrelay.errors import UsageError
from torchrelay.jobs.data_parallel import bare_ddp_instances, data_parallel, wraps


def test_one_process_needs_no_wrapper():
    """Without other ranks the module comes back as it is, and no DDP is found."""
    module = nn.Linear(2, 2)
    assert data_parallel(module) is module
    assert wraps(module) is None
    assert bare_ddp_instances() == []


@pytest.mark.parametrize("options", [{"find_unused_parameters": False}, {"static_graph": True}])
def test_options_that_regroup_are_refused(options):
    """Options under which DDP regroups its buckets are refused with the reason."""
    with pytest.raises(UsageError, match="regroup"):
        data_parallel(nn.Linear(2, 2), **options)


@pytest.mark.ranks
def test_resume_on_three_ranks_is_bitwise_where_bare_ddp_is_not(tmp_path):
    """On 3 ranks a resumed run ends in the uninterrupted run's bits; bare DDP regroups and does not."""
    out = tmp_path / "found.json"
    program = Path(__file__).with_name("ddp_resume_program.py")
    finished = torchrun(program, str(out), warm=True, ranks=3, cwd=tmp_path)
    assert finished.rc == 0, finished
    found = json.loads(out.read_text())
    assert found.pop("bare_resumes") is False  # what data_parallel is for; if torch changes, drop it
    assert found == dict.fromkeys(found, True)
