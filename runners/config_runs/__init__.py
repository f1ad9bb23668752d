"""Runs described by YAML: five replaceable steps on top of the same job and runner."""
