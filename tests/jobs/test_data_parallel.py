"""data_parallel: DDP whose sums are the same after a restart."""

import json
from pathlib import Path

import pytest
from torch import nn
from torchrun import torchrun

from torchrelay.errors import UsageError
from torchrelay.jobs.data.data_parallel import bare_ddp_instances, broadcast_buffers, data_parallel


def test_one_process_needs_no_wrapper():
    """Without other ranks the module comes back as it is, and no new DDP is found."""
    module = nn.Linear(2, 2)
    before = {id(wrapper) for wrapper in bare_ddp_instances()}  # other tests wrap in this process
    assert data_parallel(module) is module
    assert broadcast_buffers() == []
    assert {id(wrapper) for wrapper in bare_ddp_instances()} <= before


@pytest.mark.parametrize("options", [{"find_unused_parameters": False}, {"static_graph": True}])
def test_options_that_regroup_are_refused(options):
    """Options under which DDP regroups its buckets are refused with the reason."""
    with pytest.raises(UsageError, match="regroup"):
        data_parallel(nn.Linear(2, 2), **options)


@pytest.mark.ranks
def test_resume_on_three_ranks_is_bitwise_where_bare_ddp_is_not(tmp_path):
    """On 3 ranks a resumed run ends in the same bits, unlike with bare DDP, and torch warns of nothing."""
    out = tmp_path / "found.json"
    program = Path(__file__).with_name("ddp_resume_program.py")
    finished = torchrun(program, str(out), warm=True, ranks=3, cwd=tmp_path)
    assert finished.rc == 0, finished
    assert "did not find any unused parameters" not in finished.out + finished.err
    found = json.loads(out.read_text())
    assert found.pop("bare_resumes") is False  # what data_parallel is for; if torch changes, drop it
    assert found == dict.fromkeys(found, True)
