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

_NAMES = {
    "checkpoint.files.blob_files": "estimate_bytes load_blobs save_blobs",
    "checkpoint.files.dcp": "DcpReader",
    "checkpoint.files.interop": "export_checkpoint import_checkpoint",
    "checkpoint.files.load_into": "load_into",
    "checkpoint.load.checkpoint": "open_checkpoint",
    "checkpoint.manager.base": "db_name get_ckpt_filename",
    "checkpoint.manager.checkpoint_manager": "CheckpointManager MultiNodeCheckpointManager "
    "UploadTaskGroupBuilder",
    "checkpoint.state.module_leaves": "fsdp_state",
    "checkpoint.storage.open": "Tier",
    "errors": "RelayError",
    "jobs.blobs": "Scope",
    "jobs.cluster": "Cluster Node",
    "jobs.data.data_parallel": "data_parallel",
    "jobs.data.loader": "EpochLoader",
    "jobs.data.readers": "DatasetReader ReaderWithLimit",
    "jobs.job": "Job TaskGroup",
    "jobs.random": "seed",
    "jobs.stop": "StopAnswer StopCondition early_stopping epoch_limiter max_epochs max_steps max_time",
    "jobs.task": "Counter Task TaskOutput final_output",
    "jobs.workspace": "Workspace WorkspaceType",
    "metadata.code.imports": "load_code",
    "metadata.code.snapshot": "Sources",
    "metadata.experiments": "metric_rows",
    "metadata.handlers": "FileMetadataHandler MetadataHandler",
    "metadata.sinks.text": "MetricSink TrackedRun",
    "metadata.sql.handler": "SqlHandler",
    "models.archive.api": "get_params get_states load_states save_states set_states",
    "models.onnx.exporter.to_onnx": "to_onnx",
    "models.onnx.importer.module": "OnnxModule from_onnx",
    "models.package.api": "load save",
    "models.package.compile": "compile",
    "models.package.reader": "open_package summary",
    "runners.artifacts.rebuild": "run_to_onnx",
    "runners.own_loop.checkpointer": "Checkpointer",
    "runners.own_loop.run": "Run",
    "runners.programs.cli": "main",
    "runners.programs.program": "Program",
    "runners.session.context": "Context",
    "runners.session.distributed": "DistributedSession",
    "runners.session.local": "LocalSession init",
    "runners.training.extras.onnx_export": "OnnxExport",
    "runners.training.extras.upstream": "InitFrom Upstream load_upstream",
    "runners.training.job_runner": "JobRunner",
    "runners.training.plan": "RunResult",
    "tools.serving.handlers": "ServingHandler TensorHandler",
}
"""The public names of each module."""
_HOMES = dict(sorted((name, home) for home, names in _NAMES.items() for name in names.split()))

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
    from torchrelay.runners.training.extras.upstream import load_upstream as load_upstream
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
