"""Migrations of the database, run by Alembic. Each is named by its number; `tables.REVISION` is the newest."""
