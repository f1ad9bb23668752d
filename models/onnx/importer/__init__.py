"""ONNX files as modules of torch that can be trained: read, checked, planned and run by our own code."""
