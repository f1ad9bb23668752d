"""Checks manifests against the schemas that Kubernetes and Kubeflow's trainer publish, unknown keys included.

The models of `kubeflow_trainer_api` are made of the OpenAPI documents of both. They drop what they do not
know, so that a document is right if it passes and nothing of it is missing in what comes back.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("kubeflow_trainer_api", reason="pip install kubeflow-trainer-api")

_MODELS = {
    ("v1", "Service"): "io_k8s_api_core_v1_service:IoK8sApiCoreV1Service",
    ("batch/v1", "Job"): "io_k8s_api_batch_v1_job:IoK8sApiBatchV1Job",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "trainer_v1alpha1_train_job:TrainerV1alpha1TrainJob",
}


def check(document: dict[str, Any]) -> None:
    """Raise ValueError (pydantic's) for a wrong value, AssertionError for a key that the schema lacks."""
    module, _, name = _MODELS[document["apiVersion"], document["kind"]].partition(":")
    model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    assert model.from_dict(document).to_dict() == document
