"""State archives: model states and plain values in one zip file, readable with zipfile and json."""
