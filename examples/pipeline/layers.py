"""Building blocks of the stages' models."""

from torch import nn


class Coder(nn.Module):
    """64 grey pixels to 32 numbers, or back; the width makes it by far the largest part."""

    def __init__(self, inputs, outputs, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, numbers):
        return self.layers(numbers)


class Reading(nn.Module):
    """A model that reads digits: loss, accuracy, and what it reads."""

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs, batch):
        return {"acc": (outputs.argmax(1) == batch[1]).float().mean()}

    def predict(self, outputs, batch):
        return {"digit": outputs.argmax(1)}
