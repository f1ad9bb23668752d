"""Sessions: node placement, workspaces, task execution, and steps that all processes take together."""
