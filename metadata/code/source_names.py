"""Which names look like source, and which folders nobody wrote."""

from __future__ import annotations

LARGEST_UNKNOWN_BYTES = 1 << 20
"""A file that git does not know is taken for source only up to this size."""

# fmt: off
_SUFFIXES = frozenset((
    ".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh",
    ".hpp", ".hxx", ".inl", ".rs", ".go", ".java", ".kt", ".swift", ".js", ".mjs", ".ts", ".tsx", ".jsx",
    ".f", ".f90", ".jl", ".r", ".lua", ".m", ".pl", ".rb", ".sh", ".bash", ".zsh", ".fish", ".sql",
    ".proto", ".fbs", ".thrift", ".ptx", ".triton", ".json", ".jsonc", ".json5", ".jsonnet", ".yaml",
    ".yml", ".toml", ".ini", ".cfg", ".conf", ".gin", ".xml", ".txt", ".md", ".rst", ".tex", ".jinja",
    ".j2", ".tmpl", ".html", ".css", ".cmake", ".mk", ".bzl", ".in", ".patch", ".diff", ".urdf", ".xacro",
    ".sdf", ".mjcf", ".sbatch", ".slurm",
))
# fmt: on
_NAMES = frozenset(("Makefile", "Dockerfile", "Containerfile", "BUILD", "WORKSPACE", "LICENSE", "Procfile"))
_JUNK = frozenset(("__pycache__", "node_modules", "venv", "site-packages"))


def is_source(name: str) -> bool:
    """Whether a file that git does not know looks like source, by its last part alone."""
    last = name.rpartition("/")[2]
    stem, dot, suffix = last.rpartition(".")
    return last in _NAMES or (bool(stem and dot) and f".{suffix.lower()}" in _SUFFIXES)


def is_junk(name: str) -> bool:
    """Whether a file or folder that git does not know is nobody's source: hidden, or made by tools."""
    return any(part.startswith(".") or part in _JUNK for part in name.split("/"))


def is_made(name: str) -> bool:
    """Whether a file is made by running the source; left out even where git knows it."""
    return name.endswith((".pyc", ".pyo")) or "__pycache__" in name.split("/")
