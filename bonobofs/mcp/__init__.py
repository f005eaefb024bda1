"""MCP server of a session: its tools and resources, over stdio or HTTP on loopback. Every call goes to guard.sock."""
