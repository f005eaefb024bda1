"""The log: one hash-chained trail for each session, written before every change, read and verified afterwards."""
