"""The trails, hash-chained append-only files of the entries, and their readers, index and verification."""
