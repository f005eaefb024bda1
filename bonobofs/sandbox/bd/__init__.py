"""bd's command line, as the gate of a session answers it."""
