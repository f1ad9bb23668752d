"""First stage: an autoencoder, which learns what digits look like."""

from torch import nn

from .layers import Coder


class Model(nn.Module):
    def __init__(self, hyper_parameters):
        super().__init__()
        self.encoder = Coder(64, 32, hyper_parameters["width"])
        self.decoder = Coder(32, 64, hyper_parameters["width"])

    def forward(self, batch):
        return self.decoder(self.encoder(batch[0]))

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[0])
