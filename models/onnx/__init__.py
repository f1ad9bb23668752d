"""ONNX files: a model becomes one, and one becomes a model."""
