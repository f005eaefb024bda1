"""Hooks of Claude Code and Codex: what each event reports to the session, and the settings that call them."""
