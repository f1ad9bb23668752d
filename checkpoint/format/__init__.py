"""Define the disk format: JSON, values, names, element types, digests, shard files, manifests, layouts."""
