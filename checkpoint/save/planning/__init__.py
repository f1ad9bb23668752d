"""Who writes which bytes of an epoch: pure, from plan to references."""
