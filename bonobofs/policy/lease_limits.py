"""The limits of [leases]: which roles may acquire leases in a session, and for how long."""

from __future__ import annotations

import re
from typing import Final

from bonobofs.policy.compiled import Policy
from bonobofs.policy.decision import Code
from bonobofs.policy.denials import LEASES_RULE, Refusal

DEFAULT_MAX: Final = 86_400
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])")
_SECONDS: Final = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def seconds_of(text: str) -> int | None:
    """Return the seconds of a duration such as 30s, 10m, 24h or 7d. None: the text is not a duration."""
    found = _DURATION.fullmatch(text)
    return None if found is None else int(found[1]) * _SECONDS[found[2]]


def duration(seconds: int) -> str:
    """Return `36h` for 129,600 seconds: in the largest unit that divides it."""
    unit = next(name for name, length in _SECONDS.items() if seconds % length == 0)
    return f"{seconds // _SECONDS[unit]}{unit}"


def longest_lease(policy: Policy) -> int:
    """Return the longest time, in seconds, of a lease that a session acquires."""
    return int(policy.document.get("leases", {}).get("max", DEFAULT_MAX))


def may_lease(policy: Policy, role: str) -> bool:
    """True if a role may acquire leases: `who` names it or, without `who`, the role may write."""
    if role not in policy.roles:
        return False
    who = policy.document.get("leases", {}).get("who")
    if who is not None:
        return role in who
    write = policy.roles[role].write
    return write is None or bool(write)


def check_lease(policy: Policy, role: str, seconds: int) -> Refusal | None:
    """Return the refusal of a lease of so many seconds for a role. None: the policy permits it."""
    if role not in policy.roles:
        return policy.unknown_role
    if not may_lease(policy, role):
        roles = ", ".join(name for name in sorted(policy.roles) if may_lease(policy, name)) or "no role"
        reason = f"The role {role} may not acquire leases."
        return Refusal(Code.ROLE, LEASES_RULE, reason, f"Ask the operator; these roles may: {roles}.")
    longest = longest_lease(policy)
    if seconds > longest:
        reason = f"The policy limits a lease to {duration(longest)}."
        return Refusal(Code.ROLE, LEASES_RULE, reason, "Acquire it for less, and extend it while you need it.")
    return None
