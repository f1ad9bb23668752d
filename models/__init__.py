"""A trained model as a file: state archives, packages, ONNX."""
