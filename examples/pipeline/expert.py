"""Second stage: read digits, starting from the encoder of the first stage, which it trains further."""

from torch import nn

from .layers import Coder, Reading


class Model(Reading):
    def __init__(self, hyper_parameters):
        super().__init__()
        self.encoder = Coder(64, 32, hyper_parameters["width"])
        self.head = nn.Linear(32, 10)

    def forward(self, batch):
        return self.head(self.encoder(batch[0]))
