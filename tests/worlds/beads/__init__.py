"""The parts of `tests/worlds/bd`. The standard library alone: it is started with an environment made from nothing."""
