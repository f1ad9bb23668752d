"""Verified bytes of leaves: from files to boxes of tensors."""
