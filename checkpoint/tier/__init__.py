"""A near place before the checkpoints' own: saves are acknowledged near, and go up behind the training."""
