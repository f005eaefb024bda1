"""`bonobofs mcp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from bonobofs.cli.options import Argument, Option
from bonobofs.errors import StateError, UsageError

_LAST_PORT: Final = 65535


def mcp(
    directory: Annotated[
        Path | None, Argument(metavar="[DIRECTORY]", help="A directory in the mount. Default: this one.")
    ] = None,
    port: Annotated[
        int | None, Option("--http", metavar="PORT", minimum=0, help="Serve HTTP on 127.0.0.1, not stdio.")
    ] = None,
    token_file: Annotated[
        Path | None, Option(metavar="FILE", help="With --http: the file of the token. Created if missing.")
    ] = None,
) -> None:
    """Serve the session's tools to an MCP client, under the session's policy.

    \b
    Examples:
      claude mcp add --scope project bonobofs -- bonobofs mcp
      bonobofs mcp ~/work --http 8765 --token-file ~/.config/bonobofs-token
    """
    if (port is None) != (token_file is None):
        raise UsageError("--http and --token-file go together; give both, or neither for stdio")
    if port is not None and port > _LAST_PORT:
        raise UsageError(f"{port} is not a port; a port is a number up to {_LAST_PORT}, and 0 means a free one")
    try:
        from bonobofs.mcp import transport_loops  # noqa: PLC0415 - the SDK is an optional dependency
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "mcp_types", "anyio", "uvicorn"):
            raise
        raise StateError(
            f"the MCP SDK is not installed ({error.name} is missing); install it: pip install 'bonobofs[mcp]'"
        ) from None
    place = directory or Path()
    if port is None or token_file is None:
        transport_loops.serve_stdio(place)
    else:
        transport_loops.serve_http(place, port, token_file, lambda address: print(address, flush=True))
