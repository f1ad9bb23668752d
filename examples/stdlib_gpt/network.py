"""Extensions of the default steps: mesh, bf16, schedule, clipping, validation, a sample of text."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import distributed
from torch.optim.lr_scheduler import LambdaLR

from torchrelay import Task, lifecycle

from .corpus import Corpus
from .parallel import clip, mesh_of, shard

PROMPT = b"def "


@dataclass
class Chosen:
    """The section `hyper_parameters`; every key is read, whether it is trained or only evaluated."""

    width: int
    heads: int
    layers: int
    context: int
    tensor_parallel: int
    precision: str
    clip_norm: float
    sample_bytes: int
    schedule: dict
    optimizer: dict


class Network(lifecycle.Network):
    mesh = None

    def build(self, context):
        self.chosen = context.config.section("hyper_parameters", Chosen)
        super().build(context)
        if context.is_infer:
            return
        job, (phase,) = context.job, context.phases.values()
        keys = next(one for one in context.settings.dataset if one.name == "validation")
        in_order = replace(phase.keys, shuffle_filelist=False)
        validation = replace(phase, loader=self.build_loader(context, in_order, keys), prefix="val/")
        corpus = Corpus({"train": phase.loader.dataset.rows, "validation": validation.loader.dataset.rows})
        job.blobs.add({"corpus": corpus}, scope="replicated")
        Task(lifecycle.evaluation(context, validation), group=job.epoch_group, name="validate")

        @job.init(on="rank0")
        def tell_corpus(ctx):
            told = {**corpus.state_dict(), **corpus.parts}
            Path(ctx.run_dir, "corpus.json").write_text(json.dumps(told, indent=1))

        @job.epoch
        def sample(ctx):
            phase.model.eval()
            text = PROMPT + phase.model.continued(PROMPT, self.chosen.sample_bytes, seed=ctx.epoch)
            if ctx.rank == 0:
                place = Path(ctx.run_dir, "samples", f"epoch_{ctx.epoch}.txt")
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(text)

    def build_trained(self, context, model):
        """Sharded over the mesh where several ranks train it; computing in bf16 in any case."""
        if distributed.is_initialized() and not context.is_infer:
            self.mesh = mesh_of(context.device, self.chosen.tensor_parallel)
            shard(model, self.mesh, self.chosen.tensor_parallel)
        if self.chosen.precision == "bf16":
            model.forward = torch.autocast(context.device.type, torch.bfloat16)(model.forward)
        return model

    def build_loader(self, context, phase, dataset):
        """Ranks that share a layer read the same samples."""
        loader = super().build_loader(context, phase, dataset)
        if self.mesh is None:
            return loader
        data = self.mesh["data"]
        return loader.placed(data.get_local_rank(), data.size())

    def build_optimizer(self, context, model):
        optimizer = super().build_optimizer(context, model)

        def before_step(*_):
            clip(model.parameters(), self.chosen.clip_norm)

        optimizer.register_step_pre_hook(before_step)
        return optimizer

    def build_scheduler(self, context, optimizer):
        """Up in a line, then down to a tenth by a cosine."""
        warm, steps = self.chosen.schedule["warm_up_steps"], self.chosen.schedule["steps"]

        def factor(step):
            if step < warm:
                return (step + 1) / warm
            return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm)))

        return LambdaLR(optimizer, factor)
