"""The policy: the document that a person writes, and the pure engine that decides by it."""
