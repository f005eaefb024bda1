"""The front door: `python mount.py SOURCE MOUNTPOINT` does what `bonobofs mount SOURCE MOUNTPOINT` does."""

import sys

if __name__ == "__main__":
    try:
        from bonobofs.cli import main
    except ModuleNotFoundError as missing:
        sys.exit(f"bonobofs: the Python package {missing.name} is missing; install bonobofs: pip install .")
    sys.exit(main(["mount", *sys.argv[1:]]))
