"""What the bytes mean: JSON, values, names, element types, digests, shard files, manifests, layouts."""
