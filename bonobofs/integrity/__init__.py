"""Keeping watch over a source: what changes in it, whoever changes it."""
