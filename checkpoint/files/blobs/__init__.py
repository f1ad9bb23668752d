"""Blobs in single files, without any job."""
