"""The one place where a change is authorized and recorded; see `enforcer`."""
