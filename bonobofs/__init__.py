"""bonobofs: a write policy for programs that write code, applied at the system call."""

__version__ = "0.1.0"
