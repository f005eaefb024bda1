"""The front door: `python mount.py SOURCE MOUNTPOINT` does what `bonobofs mount SOURCE MOUNTPOINT` does."""

import sys

if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - pip checks the version, and pip need not have run
        sys.exit("bonobofs: this Python is too old; run mount.py with Python 3.11 or later")
    from bonobofs.cli import main

    sys.exit(main(["mount", *sys.argv[1:]]))
