"""The Python API for files: `FileGuard` and `FileTools`."""
