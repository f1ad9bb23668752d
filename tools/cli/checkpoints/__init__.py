"""Subcommands of `torchrelay ckpt`: inspect, compare, mark, convert and clean up checkpoints."""
