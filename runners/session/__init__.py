"""Sessions: nodes are placed and their workspaces held, tasks run, all processes step and end together."""
