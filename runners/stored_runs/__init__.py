"""Runs in stores: worked on near, put up behind the training, read from anywhere."""
