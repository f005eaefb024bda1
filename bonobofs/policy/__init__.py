"""The policy: the document that the operator writes, and the pure engine that decides by it."""
