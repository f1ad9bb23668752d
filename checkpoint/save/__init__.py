"""Save an epoch: capture, plan, write, commit; reuse the bytes of unchanged leaves."""
