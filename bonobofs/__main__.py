"""`python -m bonobofs`."""

from bonobofs.cli import run

if __name__ == "__main__":
    run()
