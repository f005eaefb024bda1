"""Migrations of the database, run by Alembic. The number names each one; `schema.REVISION` is the newest."""
