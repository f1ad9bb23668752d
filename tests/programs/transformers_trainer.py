"""A training of transformers' Trainer, killed at the step `--kill`; it saves `--every` so many steps."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from torchrelay.integrations.transformers import RelayCallback


class Kill(TrainerCallback):
    """Prints what is trained on, and kills the last rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_pre_optimizer_step(args, state, control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.at and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class ShardedTrainer(Trainer):
    """Trains with FSDP 2. accelerate refuses it on CPUs, where torch can do it."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        self.is_fsdp_enabled = True


def print_batch(model: torch.nn.Module, _: Any, given: dict[str, Any]) -> None:
    """Show which samples are trained on."""
    if model.training:
        samples = [hashlib.sha256(bytes(row)).hexdigest()[:12] for row in given["input_ids"].tolist()]
        print(f"batch {' '.join(samples)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--every", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sharded", action="store_true")
    given = parser.parse_args()
    set_seed(3)
    shape = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16)
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True, attention_dropout=0.2))
    model.register_forward_pre_hook(print_batch, with_kwargs=True)
    data = [{"input_ids": torch.randint(0, 32, (8,))} for _ in range(26)]
    data = [{**one, "labels": one["input_ids"]} for one in data]
    arguments = TrainingArguments(
        output_dir=str(Path(given.folder).parent / "output"),
        use_cpu=True,
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=2,
        num_train_epochs=given.epochs,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        logging_steps=3,
        eval_strategy="epoch",
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    relay = RelayCallback(given.folder, every=given.every)
    trainer = (ShardedTrainer if given.sharded else Trainer)(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:6],
        callbacks=[EarlyStoppingCallback(9), relay, Kill(given.kill)],
    )
    relay.train(trainer)
    inner = trainer.accelerator.unwrap_model(model)
    states = trainer.optimizer.state
    parts = [*inner.state_dict().values(), torch.rand(1)]
    parts += [states[one][name] for one in inner.parameters() for name in ("exp_avg", "exp_avg_sq")]
    assert given.sharded == any(isinstance(one, DTensor) for one in parts)
    parts = [one.full_tensor() if isinstance(one, DTensor) else one for one in parts]
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in parts)).hexdigest()
    times = ("runtime", "_per_second", "_preparation_time")
    logs = [
        {name: value for name, value in one.items() if not name.endswith(times) and name != "train_loss"}
        for one in trainer.state.log_history
    ]
    print(f"digest {digest} rate {trainer.lr_scheduler.get_last_lr()}", flush=True)
    print(f"state {trainer.state.global_step} {trainer.state.total_flos} {logs}", flush=True)
