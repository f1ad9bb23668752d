"""Launch a training program on one machine or a cluster; torchrun runs the ranks."""
