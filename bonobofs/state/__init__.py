"""What is kept outside the workspaces, and what stands on this machine: home, agents, sessions, mounts, processes."""
