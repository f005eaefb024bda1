"""Agent Mail: the record carried to people and other agents, and its heads posted where only they can be forgotten.

server      one MCP server, spoken to over HTTP
mailbox     what a courier needs of it, in both dialects that there are
letters     how entries are written into a letter, and what its subject says for us
courier     which entries go when, each of them once
witness     the heads that were posted, compared with what the trails hold now
"""
