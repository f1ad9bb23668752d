"""Read verified bytes of leaves from files into boxes of tensors."""
