"""The state directory and the database: agents, sessions, leases, worktrees, backups, migrations."""
