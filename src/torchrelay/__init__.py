"""torchrelay: a training job as a relay race of epochs.

    jobs/         job definitions        imports no other package
    metadata/     run directories        imports no other package
    checkpoint/   storage of state       may import jobs and the metadata handler's protocol
    runners/      execution              may import those above
    tools/        command line, reports  may import all

Importing this package has no side effects and does not import torch: public names are imported on first use.
The first use also lets an uncaught error of torchrelay end the program with one line and its exit code.
"""

# ruff: noqa: I001 - re-exports, several per line

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_HOMES = {
    "CheckpointManager": "checkpoint.manager.checkpoint_manager",
    "Checkpointer": "runners.own_loop.checkpointer",
    "Cluster": "jobs.cluster",
    "Context": "runners.session.context",
    "Counter": "jobs.task",
    "DatasetReader": "jobs.data.readers",
    "DcpReader": "checkpoint.files.dcp",
    "DistributedSession": "runners.session.distributed",
    "EpochLoader": "jobs.data.loader",
    "FileMetadataHandler": "metadata.handlers",
    "InitFrom": "runners.training.extras.upstream",
    "Job": "jobs.job",
    "JobRunner": "runners.training.job_runner",
    "LocalSession": "runners.session.local",
    "MetadataHandler": "metadata.handlers",
    "MetricSink": "metadata.sinks.text",
    "MultiNodeCheckpointManager": "checkpoint.manager.checkpoint_manager",
    "Node": "jobs.cluster",
    "OnnxExport": "runners.training.extras.onnx_export",
    "OnnxModule": "models.onnx.importer.module",
    "Program": "runners.programs.program",
    "ReaderWithLimit": "jobs.data.readers",
    "RelayError": "errors",
    "Run": "runners.own_loop.run",
    "RunResult": "runners.training.plan",
    "Scope": "jobs.blobs",
    "ServingHandler": "tools.serving.handlers",
    "Sources": "metadata.code.snapshot",
    "SqlHandler": "metadata.sql.handler",
    "StopAnswer": "jobs.stop",
    "StopCondition": "jobs.stop",
    "Task": "jobs.task",
    "TaskGroup": "jobs.job",
    "TaskOutput": "jobs.task",
    "TensorHandler": "tools.serving.handlers",
    "Tier": "checkpoint.storage.open",
    "TrackedRun": "metadata.sinks.text",
    "UploadTaskGroupBuilder": "checkpoint.manager.checkpoint_manager",
    "Upstream": "runners.training.extras.upstream",
    "Workspace": "jobs.workspace",
    "WorkspaceType": "jobs.workspace",
    "compile": "models.package.compile",
    "data_parallel": "jobs.data.data_parallel",
    "db_name": "checkpoint.manager.base",
    "early_stopping": "jobs.stop",
    "epoch_limiter": "jobs.stop",
    "estimate_bytes": "checkpoint.files.blob_files",
    "export_checkpoint": "checkpoint.files.interop",
    "final_output": "jobs.task",
    "from_onnx": "models.onnx.importer.module",
    "fsdp_state": "checkpoint.state.module_leaves",
    "get_ckpt_filename": "checkpoint.manager.base",
    "get_params": "models.archive.api",
    "get_states": "models.archive.api",
    "import_checkpoint": "checkpoint.files.interop",
    "init": "runners.session.local",
    "load": "models.package.api",
    "load_blobs": "checkpoint.files.blob_files",
    "load_code": "metadata.code.imports",
    "load_into": "checkpoint.files.load_into",
    "load_states": "models.archive.api",
    "load_upstream": "runners.training.extras.warm_start",
    "main": "runners.programs.cli",
    "max_epochs": "jobs.stop",
    "max_steps": "jobs.stop",
    "max_time": "jobs.stop",
    "metric_rows": "metadata.experiments",
    "open_checkpoint": "checkpoint.load.checkpoint",
    "open_package": "models.package.reader",
    "run_to_onnx": "runners.artifacts.rebuild",
    "save": "models.package.api",
    "save_blobs": "checkpoint.files.blob_files",
    "save_states": "models.archive.api",
    "seed": "jobs.random",
    "set_states": "models.archive.api",
    "summary": "models.package.reader",
    "to_onnx": "models.onnx.exporter.to_onnx",
}

if TYPE_CHECKING:
    from torchrelay.checkpoint.files.blob_files import estimate_bytes as estimate_bytes
    from torchrelay.checkpoint.files.blob_files import load_blobs as load_blobs, save_blobs as save_blobs
    from torchrelay.checkpoint.files.dcp import DcpReader as DcpReader
    from torchrelay.checkpoint.files.interop import export_checkpoint as export_checkpoint
    from torchrelay.checkpoint.files.interop import import_checkpoint as import_checkpoint
    from torchrelay.checkpoint.files.load_into import load_into as load_into
    from torchrelay.checkpoint.load.checkpoint import open_checkpoint as open_checkpoint
    from torchrelay.checkpoint.manager.base import db_name as db_name, get_ckpt_filename as get_ckpt_filename
    from torchrelay.checkpoint.manager.checkpoint_manager import CheckpointManager as CheckpointManager
    from torchrelay.checkpoint.manager.checkpoint_manager import (
        MultiNodeCheckpointManager as MultiNodeCheckpointManager,
    )
    from torchrelay.checkpoint.manager.checkpoint_manager import (
        UploadTaskGroupBuilder as UploadTaskGroupBuilder,
    )
    from torchrelay.checkpoint.state.module_leaves import fsdp_state as fsdp_state
    from torchrelay.checkpoint.storage.open import Tier as Tier
    from torchrelay.errors import RelayError as RelayError
    from torchrelay.jobs.blobs import Scope as Scope
    from torchrelay.jobs.cluster import Cluster as Cluster, Node as Node
    from torchrelay.jobs.data.data_parallel import data_parallel as data_parallel
    from torchrelay.jobs.data.loader import EpochLoader as EpochLoader
    from torchrelay.jobs.data.readers import DatasetReader as DatasetReader
    from torchrelay.jobs.data.readers import ReaderWithLimit as ReaderWithLimit
    from torchrelay.jobs.job import Job as Job, TaskGroup as TaskGroup
    from torchrelay.jobs.random import seed as seed
    from torchrelay.jobs.stop import StopAnswer as StopAnswer, StopCondition as StopCondition
    from torchrelay.jobs.stop import early_stopping as early_stopping, epoch_limiter as epoch_limiter
    from torchrelay.jobs.stop import max_epochs as max_epochs, max_steps as max_steps, max_time as max_time
    from torchrelay.jobs.task import Counter as Counter, Task as Task, TaskOutput as TaskOutput
    from torchrelay.jobs.task import final_output as final_output
    from torchrelay.jobs.workspace import Workspace as Workspace, WorkspaceType as WorkspaceType
    from torchrelay.metadata.code.imports import load_code as load_code
    from torchrelay.metadata.code.snapshot import Sources as Sources
    from torchrelay.metadata.experiments import metric_rows as metric_rows
    from torchrelay.metadata.handlers import FileMetadataHandler as FileMetadataHandler
    from torchrelay.metadata.handlers import MetadataHandler as MetadataHandler
    from torchrelay.metadata.sinks.text import MetricSink as MetricSink, TrackedRun as TrackedRun
    from torchrelay.metadata.sql.handler import SqlHandler as SqlHandler
    from torchrelay.models.archive.api import load_states as load_states, save_states as save_states
    from torchrelay.models.archive.api import set_states as set_states
    from torchrelay.models.archive.api import get_params as get_params, get_states as get_states
    from torchrelay.models.onnx.exporter.to_onnx import to_onnx as to_onnx
    from torchrelay.models.onnx.importer.module import OnnxModule as OnnxModule, from_onnx as from_onnx
    from torchrelay.models.package.api import load as load, save as save
    from torchrelay.models.package.compile import compile as compile
    from torchrelay.models.package.reader import open_package as open_package, summary as summary
    from torchrelay.runners.artifacts.rebuild import run_to_onnx as run_to_onnx
    from torchrelay.runners.own_loop.checkpointer import Checkpointer as Checkpointer
    from torchrelay.runners.own_loop.run import Run as Run
    from torchrelay.runners.programs.cli import main as main
    from torchrelay.runners.programs.program import Program as Program
    from torchrelay.runners.session.context import Context as Context
    from torchrelay.runners.session.distributed import DistributedSession as DistributedSession
    from torchrelay.runners.session.local import LocalSession as LocalSession, init as init
    from torchrelay.runners.training.extras.onnx_export import OnnxExport as OnnxExport
    from torchrelay.runners.training.extras.upstream import InitFrom as InitFrom, Upstream as Upstream
    from torchrelay.runners.training.extras.warm_start import load_upstream as load_upstream
    from torchrelay.runners.training.job_runner import JobRunner as JobRunner
    from torchrelay.runners.training.plan import RunResult as RunResult
    from torchrelay.tools.serving.handlers import ServingHandler as ServingHandler
    from torchrelay.tools.serving.handlers import TensorHandler as TensorHandler

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'torchrelay' has no attribute {name!r}")
    importlib.import_module("torchrelay.errors").install_excepthook()
    value = getattr(importlib.import_module(f"torchrelay.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
