"""The benchmark behind `scripts/bench`. Standard library only; peers live in an environment of their own.

`command` reads the arguments and prepares, as whoever calls it; `measure` runs once for each tree and user, as that
user; `client` and `loopback` are programs of their own.
"""
