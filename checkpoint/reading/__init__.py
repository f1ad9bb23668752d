"""Proof, verified bytes of leaves, choosing an epoch, loading without a job."""
