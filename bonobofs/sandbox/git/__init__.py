"""The program `git` of a session: its language, and how it asks the gate."""
