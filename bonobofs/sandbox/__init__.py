"""What stands around an agent: where it may work (`boundary`), and the programs that ask the gates for it (`git`)."""
