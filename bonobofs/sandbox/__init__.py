"""The sandbox of `bonobofs run`: bubblewrap, seccomp and Landlock around one command."""
