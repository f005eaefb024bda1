"""`bonobofs network show|allow|disallow|reset`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from bonobofs import session
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import document, note, say
from bonobofs.errors import BonobofsError
from bonobofs.policy.allow_list import DEFAULT_PORTS, EVERYTHING, parse_entry
from bonobofs.policy.engine import Policy
from bonobofs.sandbox import network_list

app = Group(help="Show and edit the operator's list of hosts for bonobofs run.")

Hosts = Annotated[list[str], Argument(metavar="HOST...", help="NAME, NAME:PORT, *.NAME, ADDRESS:PORT or *.")]
SourceOption = Annotated[
    Path | None,
    Option("--source", metavar="DIR", help="The list of this source. Default: the list of all other sources."),
]


@app.command("show")
def show(
    source: SourceOption = None, json: Annotated[bool, Option("--json", help="One JSON document.")] = False
) -> None:
    """Show the operator's list, and the list of the policy. A connection needs both.

    Without --source, the policy is that of the working directory.

    \b
    Examples:
      bonobofs network show
      bonobofs network show --source ~/src/app --json
    """
    home, directory = session.home(), _real(source)
    lists = network_list.read_lists(home)
    operator = lists.general if directory is None else lists.sources.get(str(directory), lists.general)
    in_force = session.in_force(home, root=directory)
    policy = in_force.compiled.document.get("network", {}).get("allow", [])
    if json:
        document(
            {
                "file": str(network_list.list_file(home)),
                "operator": operator,
                "sources": lists.sources,
                "policy": policy,
                "policy_origin": in_force.origin,
            }
        )
        return
    say(f"operator: {_listed(operator)}")
    if directory is None:
        for path, entries in sorted(lists.sources.items()):
            say(f"operator, for {path}: {_listed(entries)}")
    say(f"policy {in_force.origin}: {_listed([_text(entry) for entry in policy])}")


@app.command("allow")
def allow(hosts: Hosts, source: SourceOption = None) -> None:
    """Add hosts to the operator's list. Running sessions follow within a second.

    Without a port, a host is admitted at the ports 80 and 443. The policy must admit the host too.

    \b
    Examples:
      bonobofs network allow api.example.com '*.example.org:443'
      bonobofs network allow --source ~/src/app db.example.com:5432
    """
    home, directory = session.home(), _real(source)
    before = network_list.read_lists(home)
    old = before.general if directory is None else before.sources.get(str(directory), before.general)
    entries = network_list.allow(home, directory, hosts)
    say(f"operator: {_listed(entries)}")
    if EVERYTHING in old:
        note('the list has "*", which admits every host; remove it first to list single hosts: network disallow "*"')
    try:
        policy = session.in_force(home, root=directory)
    except BonobofsError as error:
        note(f"whether the policy admits the hosts is unknown: {error}")
        return
    for host in hosts:
        if not _is_admitted(host, policy.compiled):
            note(f"the policy {policy.origin} still refuses {host}; add it to allow of [network] there")


@app.command("disallow")
def disallow(hosts: Hosts, source: SourceOption = None) -> None:
    """Remove hosts from the operator's list. Running sessions cut connections that are no longer admitted.

    \b
    Example:
      bonobofs network disallow '*'     the list is empty: no network
    """
    say(f"operator: {_listed(network_list.disallow(session.home(), _real(source), hosts))}")


@app.command("reset")
def reset(source: SourceOption = None) -> None:
    """Return to the first list, which admits every host that the policy admits. The old file is kept.

    With --source, the general list applies to that source again.
    """
    say(f"operator: {_listed(network_list.reset(session.home(), _real(source)))}")


def _real(source: Path | None) -> Path | None:
    return None if source is None else Path(os.path.realpath(source))


def _listed(entries: list[str]) -> str:
    return ", ".join(entries) or "no host"


def _text(entry: Any) -> str:
    return entry if isinstance(entry, str) else f"{entry['host']} (private)"


def _is_admitted(host: str, policy: Policy) -> bool:
    """True if the policy admits all that an entry of the operator's list admits, as far as a name can show."""
    if host == EVERYTHING:
        return policy.network.admits_all
    entry = parse_entry(host)
    name = f"any.{entry.host}" if entry.wildcard else entry.host
    return all(policy.network.admits(name, port) for port in ([entry.port] if entry.port else DEFAULT_PORTS))
