"""Migrations of the database, run by Alembic. The number names each one; `sqlite_file.REVISION` is the newest."""
