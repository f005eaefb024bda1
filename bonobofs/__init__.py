"""bonobofs: a FUSE file system that enforces a write policy on AI agents."""

__version__ = "0.1.0"
