"""The script that Alembic runs to migrate, in the transaction of the connection that `state.migrate` passes."""

from __future__ import annotations

from alembic import context

from bonobofs.state.schema import with_partial_indexes
from bonobofs.state.sqlite_file import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=with_partial_indexes(),
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
