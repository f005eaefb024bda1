"""The mount: the kernel's FUSE protocol in plain Python, over a source directory; the enforcer judges changes."""
