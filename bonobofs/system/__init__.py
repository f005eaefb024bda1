"""The operating system: system calls, paths, mounts, processes and inotify. Nothing here knows the policy."""
