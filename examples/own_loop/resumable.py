"""Trains a classifier of handwritten digits, saved and resumed: torchrun --nproc-per-node=2 resumable.py."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchrelay


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    right = torch.zeros(2, device=device)
    for x, y in loader:
        right[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
        right[1] += len(y)
    dist.all_reduce(right)
    return float(right[0] / right[1])


def main():
    args = parse_args()
    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)

    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (pixels.float() / 16).reshape(-1, 1, 8, 8)
    train_data = TensorDataset(images[:1440], labels[:1440])
    val_data = TensorDataset(images[1440:], labels[1440:])
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, args.batch_size, sampler=sampler, num_workers=args.workers)
    val_loader = DataLoader(val_data, 256, sampler=DistributedSampler(val_data, shuffle=False))

    model = make_model().to(device)
    ddp = DistributedDataParallel(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = OneCycleLR(
        optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(train_loader) // args.accumulate
    )

    blobs = dict(model=model, ema=ema, optimizer=optimizer, scheduler=scheduler)  # what is saved, by name
    stop = torchrelay.early_stopping("val/accuracy", "max", args.patience)
    options = dict(best=("val/accuracy", "max"), stop_when=[stop], trackers=["tensorboard"], params=args)
    with torchrelay.Run(args.folder, blobs, **options) as run:
        for epoch in run.epochs(args.epochs):
            model.train()
            for index, (x, y) in enumerate(run.steps(train_loader), 1):
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
                (loss / args.accumulate).backward()
                if index % args.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    ema.update_parameters(model)
            run.log("train/loss", loss, "last")
            if epoch % 2 == 0:
                accuracy = evaluate(ema, val_loader, device)
                if rank == 0:
                    print(f"epoch {epoch}: accuracy {accuracy:.4f}")
                run.log("val/accuracy", accuracy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
