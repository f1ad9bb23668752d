"""A step of one's own: initial values. What torchrelay does at this step is done first."""

import torch

from torchrelay import lifecycle


class Startup(lifecycle.Startup):
    def start(self, context):
        super().start(context)
        scale = context.config.section("hyper_parameters")["init_scale"]
        with torch.no_grad():
            for parameter in context.phases["phase1"].model.parameters():
                parameter.mul_(scale)
