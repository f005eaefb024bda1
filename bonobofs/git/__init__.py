"""git: the session's own repository, and publication of its branches into the source."""
