"""Runs in stores: worked on locally, uploaded in the background, read from anywhere."""
