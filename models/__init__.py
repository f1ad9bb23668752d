"""Trained models as files: state archives, packages, ONNX."""
