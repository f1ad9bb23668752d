"""ONNX import: files as trainable torch modules, run by our own implementation of the operators."""
