"""Says how good agent, expert and decoder are, from the newest epoch of the last stage and nothing else."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F  # noqa: N812
from agent import Agent
from common import Autoencoder, Reader, accuracy, digits

import torchrelay


@torch.no_grad()
def main(run: str) -> None:
    checkpoint = torchrelay.open_checkpoint(run)
    agent, teacher = Agent(), Reader()
    checkpoint.load({"agent": agent, "teacher": teacher})
    print(f"epoch {checkpoint.epoch}: agent {accuracy(agent):.6f}, expert {accuracy(teacher):.6f}")
    decoder = checkpoint.upstream["expert"].upstream["encoder"].load_tensors("autoencoder.decoder")
    first = Autoencoder().decoder
    first.load_state_dict({name.removeprefix("autoencoder.decoder."): one for name, one in decoder.items()})
    pixels, _ = digits()["test"]
    print(f"decoded by the first stage: {F.mse_loss(first(teacher.encoder(pixels)), pixels).item():.6f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/agent")
