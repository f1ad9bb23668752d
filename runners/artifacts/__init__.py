"""Artifacts of finished runs: rebuilt models, ONNX files, packages and replayed calls."""
