"""Define manifests: the content of an epoch, its columns on disk, and their validation."""
