"""The one daemon of a state directory: it keeps up the index, carries the record, and minds what runs out.

Mounts work without it, and it holds up none of them: it reads what they have written.

singleton   there is one of it, by a lock that dies with its process
parts       the index and the couriers, each part at its own pace
lanes       several servers at once, none waiting for another
mirror      reservations of Agent Mail as leases, and leases that have ended
covered     what a reservation covers, as patterns of ours
process     running the parts until it is told to end
control     starting it in the background, ending it, asking how it stands
"""

from __future__ import annotations

from bonobofs.daemon.main import Standing, serve, standing, start, stop

__all__ = ["Standing", "serve", "standing", "start", "stop"]
