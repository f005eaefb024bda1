"""One session from its start to its end. The parts are wired together here and nowhere else.

setup       whose it is, in which role, under which policy
mounting    from `mount` to a mount that answers; `launch` starts the serving process
listing     how each session stands, and asking the servers to settle
ending      from `umount` to a closed record
asking      `why`: what would be said of a change
python      a session without a mount, for FileGuard and other Python callers
"""

from __future__ import annotations

from bonobofs.session.asking import ask
from bonobofs.session.ending import Ended, stop
from bonobofs.session.listing import State, Status, live_at, settle, statuses
from bonobofs.session.mounting import Mounted, Order, prepare_foreground, start
from bonobofs.session.python import OpenSession, open_session
from bonobofs.session.setup import ChosenPolicy, choose_policy
from bonobofs.state.home import home
from bonobofs.state.sessions import Session

__all__ = [
    "ChosenPolicy",
    "Ended",
    "Mounted",
    "OpenSession",
    "Order",
    "Session",
    "State",
    "Status",
    "ask",
    "choose_policy",
    "home",
    "live_at",
    "open_session",
    "prepare_foreground",
    "settle",
    "start",
    "statuses",
    "stop",
]
