"""Fingerprints of what an epoch holds, taken from the bytes on disk by the verifying reader."""

from __future__ import annotations

import hashlib

from torchrelay.checkpoint.load.checkpoint import Checkpoint


def weights_sha256(checkpoint: Checkpoint, blob: str = "model") -> str:
    """SHA-256 over names, element types, shapes and bytes of a blob's tensors."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(checkpoint.load_tensors(f"{blob}.*").items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.contiguous().view(-1).numpy().tobytes())
    return hashed.hexdigest()


def state_sha256(checkpoint: Checkpoint) -> str:
    """SHA-256 over the digests of everything: all blobs of all nodes, random states included."""
    hashed = hashlib.sha256()
    for name in sorted(checkpoint.blobs):
        hashed.update(f"{name} {checkpoint.blobs[name].digest}\n".encode())
    return hashed.hexdigest()
