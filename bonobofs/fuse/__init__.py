"""The mount: the kernel's FUSE protocol spoken in plain Python, over a source directory, through the guard."""
