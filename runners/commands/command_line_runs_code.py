"""`torchrelay runs code`: the source that a run ran, listed or written to a directory."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.metadata.code.archive import open_archive, unpack_source
from torchrelay.metadata.code.capture import capture_with_code
from torchrelay.metadata.code.manifest import SHORT, Manifest
from torchrelay.runners.commands.command_line_arguments import Add
from torchrelay.runners.commands.run_library import add_library, find_run
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.monitoring.text import human_bytes


def add_runs_code(add: Add) -> None:
    """Define `runs code`."""
    parser = add("code", "write the archived source of a run to a directory, verified", code)
    parser.add_argument("path", metavar="RUN", help="a run directory, or the id of a run")
    add_library(parser)
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="a new directory; without it the files are listed"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="what start N ran (default: the newest)")
    parser.add_argument("--force", action="store_true", help="write into a directory that is not empty")


def code(chosen: argparse.Namespace, output: Output) -> int:
    """Extract, or list, what a start of the run ran."""
    run = find_run(chosen.path, chosen.runs).path
    captured = capture_with_code(run, chosen.attempt)
    with open_archive(run / "code" / f"{captured['code']['id']}.zip") as archive:
        if chosen.output is not None:
            unpack_source(archive, Path(chosen.output), force=chosen.force)
        manifest = archive.manifest
    if output.json:
        output.value({"output": chosen.output, **_json(captured, manifest)})
        return 0
    which = f"code {archive.code_id[:SHORT]} of attempt {captured['number']}"
    count = len(manifest.files) + len(manifest.links)
    size = human_bytes(manifest.nbytes)
    if chosen.output is not None:
        output.line(f"{which}: {count} files ({size}) in {chosen.output}")
        return 0
    output.table(
        ("bytes", "file"),
        [
            *((str(file.nbytes), name) for name, file in manifest.files.items()),
            *(("link", f"{name} -> {target}") for name, target in manifest.links.items()),
        ],
    )
    output.notice(f"{which}: {count} files ({size}); -o DIR writes them")
    return 0


def _json(captured: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    code = captured["code"]
    return {
        "code_id": code["id"],
        "attempt": captured["number"],
        "script": code.get("script"),
        "git": code.get("git"),
        "files": {
            name: {"sha256": file.sha256, "bytes": file.nbytes} for name, file in manifest.files.items()
        },
        "links": dict(manifest.links),
        "left_out": code.get("left_out", []),
    }
