"""Models as ONNX files: exported from a copy, checked, compared with torch, written whole or not at all."""
