"""The session's own `.git` in a mount: who sees it, and the object stores of the source that it reads.

The scratch layer holds the repository, so that the source's `.git` is hidden from the session's user. Git refuses a
work tree that belongs to another user. Therefore the mount shows the session's user as the owner of its root. The
rights that go with that owner are those that the user has in the source.
"""

from __future__ import annotations

import errno
import os
from typing import Final, NamedTuple

from bonobofs.fuse import abi as p
from bonobofs.fuse.layer_store import LayerStore

NAME: Final = b".git"
HIDDEN: Final = b"alternates"
"""The list of further stores in a store; the session's own list names every store."""
_ACL: Final = "system.posix_acl_access"


class SessionUser(NamedTuple):
    """The session's user."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class SessionGitDir:
    """What one mount shows of git."""

    def __init__(
        self, root: LayerStore, stores: dict[bytes, LayerStore], common: int, person: SessionUser, *, shared: bool
    ) -> None:
        """`stores` are by their names in `.bonobofs`. `common` is a descriptor of the directory of the source's refs.

        `shared`: users other than the session's may enter the mount.
        """
        self.stores: Final = stores
        self.common: Final = common
        self.shared: Final = shared
        self._root: Final = root
        self.person: Final = person

    def is_seen(self, uid: int) -> bool:
        """Whether this user sees the session's repository. Others see that of the source."""
        return not self.shared or uid == self.person.uid

    def is_borrowed(self, uid: int, st: os.stat_result) -> bool:
        """Whether the kernel takes this user for the owner of the root only because the mount says so."""
        return self._root.privileged and uid not in (0, st.st_uid)

    def root_attr(self, attr: bytes, st: os.stat_result) -> bytes:
        """`fuse_attr` of the mount's root, with the session's user as the owner.

        Returns: `attr` as it is where the root has an ACL, because that would give the owner's rights to this user.
        """
        if st.st_uid == self.person.uid:
            return attr
        try:
            os.getxattr(self._root.root, _ACL)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise
            return p.with_owner(attr, self.person.uid, self._rights())
        return attr

    def _rights(self) -> int:
        try:
            self._root.act_as(*self.person, 0)
            return sum(
                right
                for right in (os.R_OK, os.W_OK, os.X_OK)
                if os.access(".", right, dir_fd=self._root.root, effective_ids=True)
            )
        finally:
            self._root.act_as_self()
