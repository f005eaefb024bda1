"""The enforcer, which authorizes and records each change; see `enforcer`."""
