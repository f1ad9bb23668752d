"""Export to and import from ONNX files."""
