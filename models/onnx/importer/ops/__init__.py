"""What the operators of ONNX compute, a file per kind: each has tables from names to functions."""
