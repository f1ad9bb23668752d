"""The storages through which every byte of a checkpoint goes: local directories and remote stores."""
