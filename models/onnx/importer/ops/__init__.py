"""Implementations of ONNX operators: each file has tables from names to functions."""
