"""Who is named in commits and reflogs: the agent as author, the service as committer."""

from __future__ import annotations

from typing import Final

from bonobofs.guards.git.rules import Rules
from bonobofs.request import Agent

COMMITTER: Final = "bonobofs <bonobofs@bonobofs.invalid>"

_CRUD: Final = str.maketrans("", "", "<>\n\r\0")


def author(agent: Agent, rules: Rules) -> str:
    """`NAME <EMAIL>` of the agent."""
    name = agent.label.translate(_CRUD).strip(" .,:;\"'\\") or agent.id
    email = f"{agent.id}@bonobofs.invalid"
    if rules.author_email is not None:
        email = rules.author_email.replace("{agent}", name).replace("{id}", agent.id)
    return f"{name} <{email.translate(_CRUD).strip()}>"
