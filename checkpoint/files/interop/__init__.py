"""Epochs out to other formats and in from them: torch.save, safetensors, Hugging Face, DCP."""
