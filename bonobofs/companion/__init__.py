"""The companion of a serving process: what a session needs beside the mount, and what the mount must not wait for.

process    its life: started by exec before the mount is made, ending with the server; and its loop
watching   changes behind the mount, told to the server at once
judging    which of them nobody admitted
policy     the policy file, loaded anew when it changes

It loads what the server does without: watchdog always, pydantic when a policy changes.
"""
