"""What the operators of ONNX compute, a file per family: each has a table from names to functions."""
