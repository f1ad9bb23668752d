"""Manifests: what an epoch consists of, its columns on disk, and what must hold of them."""
