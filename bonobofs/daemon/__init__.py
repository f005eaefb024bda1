"""The daemon of a state directory: it updates the index, sends mail, mirrors reservations and deletes expired leases.

Mounts work without it and never wait for it: it reads the trails that they write.
"""

from __future__ import annotations

from bonobofs.daemon.main import DaemonStatus, serve, start, status, stop

__all__ = ["DaemonStatus", "serve", "start", "status", "stop"]
