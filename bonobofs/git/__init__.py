"""Git: the session's own repository, and the publication of its branches into the source."""
