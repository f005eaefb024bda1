"""The trails: hash-chained, append-only records of every change, and what reads them."""
