"""Job definitions: jobs, tasks, nodes, workspaces, blobs, stop conditions, readers. No I/O, no processes."""
