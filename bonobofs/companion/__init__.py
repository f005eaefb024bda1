"""The second process of a mount: it runs what may block or needs more than the standard library.

The server must never wait and loads the standard library alone. Its companion watches the source, attributes external
changes, follows the leases, reloads the policy and answers the calls of the guard socket.
"""
