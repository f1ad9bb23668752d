"""Read and write shard files: entries, header, reads, writes."""
