"""Issues of Beads: the rules for changing them, and the client that runs bd."""

from __future__ import annotations

from bonobofs.beads.bd_client import Beads, Changed, Turn, find_beads
from bonobofs.beads.issue import BeadsIssue, Comment, Edge, Issues, NewIssue

__all__ = ["Beads", "BeadsIssue", "Changed", "Comment", "Edge", "Issues", "NewIssue", "Turn", "find_beads"]
