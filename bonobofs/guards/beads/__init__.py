"""bd, the issue tracker, as a program that is run and never believed."""

from __future__ import annotations

from bonobofs.guards.beads.client import Beads, find_beads
from bonobofs.guards.beads.issue import BeadsIssue, Comment, Edge, Issues, NewIssue
from bonobofs.guards.beads.turn import Changed, Turn

__all__ = ["Beads", "BeadsIssue", "Changed", "Comment", "Edge", "Issues", "NewIssue", "Turn", "find_beads"]
