"""Two hosts, as network namespaces joined by a veth pair; skipped where the machine cannot make them."""

from __future__ import annotations

import re
import signal
import sys

import hosts
import pytest
import two_hosts
from launching import REPOSITORY, Launch, wait_until

import torchrelay
from torchrelay.metadata.run_directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


@pytest.fixture
def pair():
    """Two joined hosts, alpha and beta."""
    why = hosts.why_not()
    if why is not None:
        pytest.skip(why)
    with hosts.TwoHosts() as made:
        yield made


def test_a_job_across_two_hosts_survives_the_loss_of_one(pair, tmp_path):
    """4 ranks on 2 hosts train, all of them write; one host is switched off; the same command resumes."""
    run = tmp_path / "run"
    first = two_hosts.launch(pair, run, tmp_path, off=pair[1])
    newest = torchrelay.open_checkpoint(run).position.epoch
    assert first.codes["alpha"] != 0 and first.codes["beta"] == -9
    assert two_hosts.OFF_AFTER <= newest < two_hosts.EPOCHS
    second = two_hosts.launch(pair, run, tmp_path)
    assert second.codes == {"alpha": 0, "beta": 0}, second
    assert second.having(f"resuming from epoch {newest}"), second
    for seen in (first, second):
        said = [line for host in pair for line in seen.saw(host.name)]
        assert len(said) == 4 and all("hosts alpha, beta" in line for line in said), said
        assert [sum(f"on {host.name};" in line for line in said) for host in pair] == [2, 2], said
    last = torchrelay.open_checkpoint(run, epoch=two_hosts.EPOCHS)
    assert set(last.manifest.world.hosts) == {"alpha", "beta"}
    assert len(last.manifest.world.hosts) == 2 and sorted(last.manifest.world.host_of) == [0, 0, 1, 1]
    written = two_hosts.written_by(run, last)
    assert len(written) == 4 and min(written.values()) > last.blobs["model"].bytes / 8, written
    status = RunDirectory(run).status()
    assert (status["state"], status["host"]) == ("FINISHED", "alpha"), status


def test_a_second_start_with_the_same_id_on_the_other_host_is_refused(pair, tmp_path):
    """While a host trains, the same --rdzv-id on another ends with exit code 4, and the first goes on."""
    (alpha, beta), run = pair, tmp_path / "run"
    with Launch(alpha.command(two_hosts.torchrun([alpha], run, 1_000_000)), tmp_path / "first.log") as first:

        def done() -> int:
            assert not first.ended(), first.lines
            return sum(" done |" in line for line in first.lines)

        wait_until(lambda: done() >= 2, 90, "an epoch of the first start")
        refused = two_hosts.launch([beta], run, tmp_path)
        seen = done()
        wait_until(lambda: done() >= seen + 2, 90, "another epoch of the first start")
    assert refused.codes["beta"] != 0 and refused.having("exitcode  : 4"), refused
    assert refused.having("is in use by job 'two-hosts'"), refused
    assert not refused.having(" done |"), refused


def test_a_run_directory_that_one_host_does_not_share_is_refused(pair, tmp_path):
    """Every rank shows which hosts see different directories; nothing is left behind."""
    shared = tmp_path / "shared"
    shared.mkdir()
    seen = two_hosts.launch(pair, shared / "run", tmp_path, private={"beta": shared})
    assert 0 not in seen.codes.values(), seen
    refused = seen.having("on alpha differs from the one on beta: choose a directory that all hosts share")
    assert len(refused) >= 4, seen
    assert not seen.having("epoch 1")
    assert list(shared.iterdir()) == []


def test_hosts_leave_nothing_behind_and_do_not_collide():
    """Two pairs of the same names live at the same time, and are gone afterwards even after an error."""
    why = hosts.why_not()
    if why is not None:
        pytest.skip(why)
    first, second = hosts.TwoHosts(), hosts.TwoHosts()
    with pytest.raises(ZeroDivisionError), first, second:
        names = [host.namespace for host in (*first.hosts, *second.hosts)]
        assert len(set(names)) == 4
        assert all((hosts.NAMESPACES / name).exists() for name in names)
        raise ZeroDivisionError
    assert not any((hosts.NAMESPACES / name).exists() for name in names)
    assert not any((hosts.NAMES_OF / name).exists() for name in names)


def test_a_script_that_is_ended_takes_its_hosts_down(tmp_path):
    """SIGTERM in the middle of scripts/two-hosts leaves no namespace and no process."""
    why = hosts.why_not()
    if why is not None:
        pytest.skip(why)
    script = REPOSITORY / "scripts/trials/two_hosts.py"
    with Launch([sys.executable, str(script), "--keep", str(tmp_path)], tmp_path / "log") as trial:
        wait_until(
            lambda: trial.ended() or any(line.startswith("==") for line in trial.lines), 100, "a stage"
        )
        names = re.findall(r"is namespace (\S+)", "\n".join(trial.lines))
        assert len(names) == 2 and all((hosts.NAMESPACES / name).exists() for name in names), trial.lines
        trial.process.send_signal(signal.SIGTERM)
        assert trial.wait(100) == 128 + signal.SIGTERM
    assert not any((hosts.NAMESPACES / name).exists() for name in names)
