"""A run described by YAML: five steps that can be replaced one by one, over the same job and runner."""
