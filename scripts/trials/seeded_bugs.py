"""Bugs that are planted one at a time, and the tests that must notice: what the tests are worth.

Each bug is a replacement of one piece of code by another in a copy of the repository. A test that passes
there all the same misses the bug.
"""

from __future__ import annotations

from collections.abc import Iterator

from planted import Bug
from seeded_reads import reading


def bugs() -> Iterator[Bug]:
    """All of them, by the promise that they break."""
    yield from _durability()
    yield from _the_log()
    yield from _retention()
    yield from _verification()
    yield from reading()
    yield from _behind()
    yield from _together()


def _durability() -> Iterator[Bug]:
    storage, writer = "checkpoint/storage/local.py", "checkpoint/format/shard/writer.py"
    yield Bug(
        "a shard is not synced",
        writer,
        "            handle.sync_file()\n            handle.close()",
        "            handle.close()",
        ["tests/checkpoint/test_shard.py"],
    )
    yield Bug(
        "the header is written first",
        writer,
        "        found = fill(handle, part, frame, seconds, writers)\n",
        "        handle.write_at(0, memoryview(frame.filled(bytes(frame.digest_bytes))))\n"
        "        found = fill(handle, part, frame, seconds, writers)\n",
        ["tests/checkpoint/test_shard.py"],
    )
    yield Bug(
        "the directory of a try is not synced",
        "checkpoint/save/commit.py",
        "    job.storage.sync_dir(attempt_directory(attempt_name))\n    return CommittedPosition(",
        "    return CommittedPosition(",
        ["tests/protocol/test_crash_states.py", "-k", "plain"],
    )
    yield Bug(
        "the manifest is not synced",
        "checkpoint/save/commit.py",
        "        handle.write_at(0, memoryview(data))\n        handle.sync_file()\n",
        "        handle.write_at(0, memoryview(data))\n",
        ["tests/protocol/test_crash_states.py", "-k", "plain"],
    )
    yield Bug(
        "the log is not synced before an append returns",
        "checkpoint/log/chain.py",
        "                continue\n            storage.sync_dir(LOG)\n",
        "                continue\n",
        ["tests/checkpoint/test_log_crash.py"],
    )
    yield Bug(
        "a record gets its name before it is synced",
        storage,
        "            self._beside(full, data, name, sync=True)\n",
        "            self._beside(full, data, name, sync=False)\n",
        ["tests/fault_injection/test_chaos_trials.py", "-k", "power"],
    )
    yield Bug(
        "a base file is not synced before the record that refers to it",
        "checkpoint/log/chain.py",
        "    storage.sync_dir(LOG)  # durable before the record that refers to it\n",
        "",
        ["tests/protocol/test_crash_states.py", "-k", "long"],
    )
    yield Bug(
        "a short write is taken for a whole one",
        storage,
        "                view, offset = view[written:], offset + written\n",
        "                view, offset = view[len(view) :], offset + written\n",
        ["tests/checkpoint/test_direct_writes.py"],
    )
    yield Bug(
        "an error of a writing thread is swallowed",
        "checkpoint/storage/work.py",
        "    if errors:\n        raise min(errors",
        "    if errors and not helpers:\n        raise min(errors",
        ["tests/checkpoint/test_direct_writes.py", "tests/checkpoint/test_writers.py"],
    )
    yield Bug(
        "an epoch is acknowledged before it is committed",
        "checkpoint/save/commit.py",
        "    try:\n        job.commit(entry)\n",
        "    try:\n        __import__('threading').Timer(0.5, job.commit, [entry]).start()\n",
        ["tests/acceptance/test_caffe2_cases.py"],
    )


def _the_log() -> Iterator[Bug]:
    append = "checkpoint/log/chain.py"
    yield Bug(
        "a record replaces what has its slot",
        "checkpoint/storage/local.py",
        "        os.link(temporary, full)\n",
        "        os.replace(temporary, full)\n",
        ["tests/checkpoint/test_log_writer.py", "tests/checkpoint/test_log_takeover.py"],
    )
    yield Bug(
        "a fenced writer continues after the takeover",
        append,
        "draft.generation is not None and tail.view.generation > draft.generation",
        "tail.view.generation < 0",
        ["tests/checkpoint/test_log_writer.py"],
    )
    yield Bug(
        "a creation in a store that failed is taken for done",
        "checkpoint/storage/object_store.py",
        "            raise error from None\n                if found != data:",
        "            return\n                if found != data:",
        ["tests/stores/test_servers.py", "-k", "any_schedule and moto"],
    )
    yield Bug(
        "a creation whose answer was lost is not read back",
        append,
        "        return found == data  # the nonce makes our bytes unique\n",
        "        return False\n",
        ["tests/checkpoint/test_log_writer.py", "tests/checkpoint/test_log_crash.py"],
    )
    yield Bug(
        "a writer is replaced without being watched",
        "checkpoint/log/lease.py",
        "if verdict.right is Right.WATCH and moves(storage, patience_secs):",
        "if False:",
        ["tests/checkpoint/test_log_takeover.py"],
    )
    yield Bug(
        "a record's digest is not looked at",
        "checkpoint/format/canonical_json.py",
        "    if sha256(body) != tail[1].decode():",
        "    if False:",
        ["tests/checkpoint/test_log_damage.py", "tests/checkpoint/test_log_record.py"],
    )
    yield Bug(
        "the chain of the log is not checked",
        "checkpoint/log/chain.py",
        "    if newer.previous_sha256 != older_sha256 or newer.generation < older.generation:\n",
        "    if False:\n",
        ["tests/checkpoint/test_log_damage.py"],
    )
    yield Bug(
        "a rewind abandons nothing until an epoch is saved",
        "runners/training/run_loop.py",
        "            self.manager.engine.ledger.rewind(self.peers, base, {**request, **by_user})\n",
        "            pass\n",
        ["tests/exactness/test_branches_after_a_rewind.py"],
    )


def _retention() -> Iterator[Bug]:
    retention = "checkpoint/log/retention.py"
    yield Bug(
        "positions inside epochs stay on other branches",
        "checkpoint/log/state.py",
        "if not one.position.boundary and one.position < entry.position]",
        "if entry.branch == one.branch and not one.position.boundary and one.position < entry.position]",
        ["tests/runners/test_deletions.py"],
    )
    yield Bug(
        "a verdict holds for another condition",
        "runners/session/stop.py",
        'holds = verdict_holds(condition, verdict.get("settings"))\n',
        "holds = True\n",
        ["tests/runners/test_changed_runs.py"],
    )
    yield Bug(
        "a process is known by its number alone",
        "checkpoint/log/lease.py",
        '    return now is None or now not in ("", start)\n',
        "    return now is None\n",
        ["tests/runners/test_standing.py"],
    )
    yield Bug(
        "tagged and pinned epochs are retired",
        retention,
        " | protected(view.state)\n",
        "\n",
        ["tests/checkpoint/test_log_retention.py"],
    )
    yield Bug(
        "what an epoch refers to is retired",
        "checkpoint/log/view.py",
        "        further = set(entry.needs) - needed if entry else set()\n",
        "        further = set()\n",
        ["tests/checkpoint/test_reuse.py", "tests/checkpoint/test_log_retention.py"],
    )
    yield Bug(
        "keep_last counts damaged epochs",
        retention,
        "[entry for entry in line if entry.healthy], list",
        "list(line), list",
        ["tests/checkpoint/test_log_retention.py"],
    )
    yield Bug(
        "a metric of zero is none",
        "checkpoint/log/view.py",
        "math.isfinite(metrics.get(entry.attempt_name, math.nan))",
        "metrics.get(entry.attempt_name)",
        ["tests/checkpoint/test_keeping.py"],
    )
    yield Bug(
        "an epoch whose metrics cannot be read is not the best",
        retention,
        "entry.attempt_name in scores.unread]",
        "False]",
        ["tests/checkpoint/test_keeping.py"],
    )
    yield Bug(
        "prune deletes before the log says so",
        "checkpoint/coordinator/retention.py",
        "        keeping.retire(writer, suspects, only_local(storage, before))\n",
        "        from torchrelay.checkpoint.log.retention import delete_attempt\n\n"
        "        for one in tuple(keeping.chosen(before, suspects)):\n"
        "            delete_attempt(writer.storage, one)\n"
        "        keeping.retire(writer, suspects, only_local(storage, before))\n",
        ["tests/tools/cli/test_prune.py", "-k", "killed"],
    )
    yield Bug(
        "files are deleted before the log says so",
        "checkpoint/coordinator/retention.py",
        "            keeping.retire(writer, suspects, self.ledger.needed())\n",
        "            from torchrelay.checkpoint.log.retention import delete_attempt\n\n"
        "            for one in tuple(keeping.chosen(view, suspects)):\n"
        "                delete_attempt(writer.storage, one)\n"
        "            keeping.retire(writer, suspects, self.ledger.needed())\n",
        ["tests/protocol/test_crash_states.py", "-k", "plain"],
    )
    yield Bug(
        "abandoned epochs go before the branch has passed them",
        retention,
        " if not own or own[0] <= entry.position}\n",
        " if False}\n",
        ["tests/checkpoint/test_log_retention.py"],
    )


def _verification() -> Iterator[Bug]:
    yield Bug(
        "a manifest's SHA-256 is not compared",
        "checkpoint/format/manifest/codec.py",
        "    if canonical_json.sha256(data) != entry.manifest_sha256:\n",
        "    if False:\n",
        ["tests/checkpoint/test_sharded_damage.py"],
    )
    yield Bug(
        "blocks are read without being verified",
        "checkpoint/format/shard/reader.py",
        "        if damaged is not None:\n            offset = entry.start",
        "        if damaged is not None and not key:\n            offset = entry.start",
        ["tests/checkpoint/test_shard_damage.py"],
    )
    yield Bug(
        "of blocks that are verified together only the first one counts",
        "checkpoint/format/dtypes.py",
        "    if found == digests:\n",
        "    if found[:SIZE] == digests[:SIZE]:\n",
        ["tests/checkpoint/test_passing.py"],
    )
    yield Bug(
        "blocks that pass through memory are not verified",
        "checkpoint/format/shard/reader.py",
        "partial(self._read_range, handle, key, entry, options.verify))\n",
        "partial(self._read_range, handle, key, entry, False))\n",
        ["tests/checkpoint/test_passing.py"],
    )
    yield Bug(
        "a header's SHA-256 is not compared",
        "checkpoint/format/shard/reader.py",
        "    if sha256(header) != expect.header_sha256:\n",
        "    if False:\n",
        ["tests/checkpoint/test_shard_damage.py", "tests/checkpoint/test_proof.py"],
    )
    yield Bug(
        "links are followed",
        "checkpoint/storage/local.py",
        "            if os.path.islink(full):  # noqa: PTH114 - a text: many reads ask\n",
        "            if False:\n",
        ["tests/bad_input/test_met_damage.py"],
    )
    yield Bug(
        "the last of two equal JSON keys wins",
        "checkpoint/format/canonical_json.py",
        "    if len(found) != len(pairs):\n",
        "    if False:\n",
        ["tests/checkpoint/test_canonical.py"],
    )
    yield Bug(
        "a leaf counts as unchanged when its first bytes are",
        "checkpoint/save/change_detection.py",
        "        if own != self.digests[start * SIZE : stop * SIZE]:\n",
        "        if start == 0 and own != self.digests[start * SIZE : stop * SIZE]:\n",
        ["tests/checkpoint/test_unchanged.py"],
    )
    yield Bug(
        "tensors assumed unchanged are never verified",
        "checkpoint/save/pipeline.py",
        "            job.reuse.check_assumed(job.peers, job.position)\n",
        "            pass\n",
        ["tests/checkpoint/test_presumed.py"],
    )


def _behind() -> Iterator[Bug]:
    yield Bug(
        "old epochs wait for a save that never comes",
        "checkpoint/manager/engine.py",
        "            self.retaining.in_background()\n            self.ledger.finish",
        "            self.ledger.finish",
        ["tests/runners/test_deletions.py"],
    )
    yield Bug(
        "no thread waits at the gate",
        "checkpoint/state/steps.py",
        "        one.pass_gate()\n",
        "        pass\n",
        ["tests/runners/test_background_saves.py"],
    )
    yield Bug(
        "late sources are not looked at again",
        "checkpoint/save/staging.py",
        "            self.compare()  # last: it also finds writes during that work\n",
        "",
        ["tests/runners/test_background_saves.py"],
    )
    yield Bug(
        "a sparse write between the samples is not noticed",
        "checkpoint/save/staging.py",
        "        return _versions(self.leaf, self.source) != self.versions\n",
        "        return False\n",
        ["tests/exactness/test_asynchronous_saves.py"],
    )
    yield Bug(
        "what is written is not what is hashed",
        "checkpoint/format/shard/writer.py",
        "                        digests.hash(piece, room[at:end])\n",
        "                        digests.hash(piece, piece.extent.data[piece.start : piece.stop])\n",
        ["tests/checkpoint/test_direct_writes.py"],
    )


def _together() -> Iterator[Bug]:
    yield Bug(
        "plans of ranks are not compared",
        "checkpoint/save/pipeline.py",
        "        odd = [rank for rank, one in enumerate(hashes) if one != hashes[0]]\n",
        "        odd = list[int]()\n",
        ["tests/review/test_one_rank_alone.py"],
    )
    yield Bug(
        "leaves of another rank are not compared with their digest",
        "checkpoint/save/agreement.py",
        "NodeClass.known(ranks, one.specs, one.leaves_digest)",
        "NodeClass.known(ranks, one.specs, 'digest')",
        ["tests/checkpoint/test_structure.py"],
    )
    yield Bug(
        "replicas that leaves of one form choose are believed to be the same",
        "checkpoint/format/mesh.py",
        "            owners = [owner(name, self.replicas) for name in names]\n",
        "            owners = [0 for name in names]\n",
        ["tests/checkpoint/test_writers.py"],
    )
    yield Bug(
        "equal meshes of several objects are distinguished",
        "checkpoint/save/assignments.py",
        "            meshes[id(leaf.sharding)],\n",
        "            meshes[id(leaf.sharding)] + str(id(leaf.sharding)),\n",
        ["tests/checkpoint/test_writers.py"],
    )
    yield Bug(
        "sizes of leaves decide no plan",
        "checkpoint/save/assignments.py",
        '            leaf.nbytes if leaf.kind == "tensor" else leaf.nbytes > VALUE_LIMIT_BYTES,\n',
        '            leaf.kind != "tensor" and leaf.nbytes > VALUE_LIMIT_BYTES,\n',
        ["tests/checkpoint/test_writers.py"],
    )
    yield Bug(
        "shards of another number of nodes are committed",
        "checkpoint/save/commit.py",
        "    if wanted != found or len(rows) != len(job.places):\n",
        "    if False:\n",
        ["tests/review/test_one_rank_alone.py"],
    )
    yield Bug(
        "all bytes of replicas are hashed and not compared",
        "checkpoint/save/pipeline.py",
        "            whole.compare(job.peers)\n",
        "            whole._compared(True)\n",
        ["tests/checkpoint/test_replicas_beside.py"],
    )
    yield Bug(
        "replicas count as compared whole though they differ",
        "checkpoint/save/replicas.py",
        "        self._compared(not verdict.failures)\n",
        "        self._compared(True)\n",
        ["tests/checkpoint/test_replicas_beside.py"],
    )
    yield Bug(
        "a comparison of all bytes that a failed save left out is forgotten",
        "checkpoint/save/agreement.py",
        "first=self._first or self._pending,",
        "first=self._first,",
        ["tests/checkpoint/test_replicas_beside.py"],
    )
    yield Bug(
        "an interrupted join counts as the end of a thread",
        "checkpoint/storage/work.py",
        "        while helper.ident is not None and not helper.over.is_set():\n"
        "            try:\n"
        "                helper.over.wait(LOOK_SECS)\n",
        "        while helper.is_alive():\n            try:\n                helper.join()\n",
        ["tests/checkpoint/test_replicas_beside.py", "-k", "interrupt"],
    )
    yield Bug(
        "random states are not restored",
        "runners/training/resume.py",
        "        for name, streams in self._streams.items():\n",
        "        for name, streams in dict(self._streams if self._state.epoch < 0 else {}).items():\n",
        ["tests/exactness/test_resume_every_epoch.py", "-k", "1"],
    )
