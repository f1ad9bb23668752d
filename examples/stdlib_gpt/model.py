"""A small GPT over bytes: pre-norm blocks, causal attention, the embedding tied to the output."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention. Its heads are those that the projections give: some, where they are sharded."""

    def __init__(self, width, heads):
        super().__init__()
        self.per_head = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        batch, time, _ = x.shape
        query, key, value = (
            one(x).view(batch, time, -1, self.per_head).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """`forward` takes a batch (bytes, next bytes) and gives logits, float[batch, time, 256]."""

    def __init__(self, hyper_parameters):
        super().__init__()
        width, heads = hyper_parameters["width"], hyper_parameters["heads"]
        self.context = hyper_parameters["context"]
        self.tokens = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(self.context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(hyper_parameters["layers"]))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(_begin)
        for block in self.blocks:
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * len(self.blocks)))
        self.head.weight = self.tokens.weight

    def forward(self, batch):
        tokens = batch[0]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def metrics(self, outputs, batch):
        return {} if self.training else {"bits_per_byte": self.loss(outputs, batch) / math.log(2)}

    @torch.no_grad()
    def continued(self, text, count, *, temperature=0.8, seed=0):
        """Generate `count` bytes after the bytes `text`; temperature 0 takes the likeliest byte each time.

        Where the model is sharded all ranks must call it, and get the same bytes.
        """
        device = self.norm.weight.device
        draw = torch.Generator().manual_seed(seed)
        tokens = list(text) or [ord("\n")]
        for _ in range(count):
            window = torch.tensor([tokens[-self.context :]], device=device)
            logits = self((window,))[0, -1].cpu()
            if temperature:
                chosen = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draw)
            else:
                chosen = logits.argmax()
            tokens.append(int(chosen))
        return bytes(tokens[len(tokens) - count :])


def _begin(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
