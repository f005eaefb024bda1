"""Protected directories and result.json: what an agent must not edit itself, and what it must hand over."""
