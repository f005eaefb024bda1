"""What Choragen kept in its own files, read so that it can be kept here: locks and governance.

Everything that means something else here, or nothing, is said with its line: nothing is widened, and nothing is dropped
in silence. Choragen's patterns are ours but for braces, which are written out, and for `**` within a name.
"""

from bonobofs.policy.choragen.governance import read_governance
from bonobofs.policy.choragen.line_source import text_of
from bonobofs.policy.choragen.locks import Lock, read_locks

__all__ = ["Lock", "read_governance", "read_locks", "text_of"]
