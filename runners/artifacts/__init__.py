"""What is made of a finished run: its model again, ONNX files, packages, calls played again."""
