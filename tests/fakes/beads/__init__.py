"""The parts of `tests/fakes/bd`. The standard library alone: it is started with an environment made from nothing."""
