"""Reads handwritten digits: python examples/classifier.py train | test | eval IN OUT | server | status."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import torchrelay


class Digits(torchrelay.Program):
    best = ("val/accuracy", "max")

    def make_data(self):
        pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
        ends = {"train": (0, 1200), "val": (1200, 1500), "test": (1500, 1797)}
        return {name: (pixels[a:b].float() / 16, labels[a:b]) for name, (a, b) in ends.items()}

    def make_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def postprocess(self, output):
        return int(output.argmax())


torchrelay.main(Digits)
