"""Clicks from three numbers. A phase's model file defines `Model`, a torch module."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Model(nn.Module):
    def __init__(self, hyper_parameters):
        super().__init__()
        hidden = hyper_parameters["hidden"]
        self.net = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch):
        features, _ = batch
        return self.net(features).squeeze(1)

    def loss(self, outputs, batch):
        return F.binary_cross_entropy_with_logits(outputs, batch[1])

    def metrics(self, outputs, batch):
        return {"acc": ((outputs > 0) == (batch[1] > 0.5)).float().mean()}

    def predict(self, outputs, batch):
        return {"click": torch.sigmoid(outputs)}
