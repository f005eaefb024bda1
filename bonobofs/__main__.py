"""`python -m bonobofs`."""

import sys

from bonobofs.cli import main

if __name__ == "__main__":
    sys.exit(main())
