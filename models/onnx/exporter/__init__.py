"""ONNX export: from a copy of the model, checked, compared with torch, written atomically."""
