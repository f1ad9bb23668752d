"""Samples from lines `click,a,b,c`. A dataset's data_converter defines `Reader`."""

import torch


class Reader:
    def read(self, path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                click, *features = map(float, line.split(","))
                yield torch.tensor(features), torch.tensor(click)
