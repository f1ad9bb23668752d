"""ONNX files of runs: of any epoch afterwards, and while a run trains."""
