"""Issues of Beads: the rules for changing them, and the client that runs bd."""

from __future__ import annotations

from bonobofs.beads.bd_client import BdClient, IssueStore, Stored, find_beads
from bonobofs.beads.issue import BeadsIssue, Comment, Edge, Issues, NewIssue

__all__ = ["BdClient", "BeadsIssue", "Comment", "Edge", "IssueStore", "Issues", "NewIssue", "Stored", "find_beads"]
