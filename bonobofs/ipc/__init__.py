"""Messages between the processes of a session: the channel of server and companion, and the guard socket."""
