# shellcheck shell=bash
# Sourced by the other scripts: functions that install what a command needs and this machine lacks.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${BONOBOFS_VENV:-$ROOT/.venv}
# A user who cannot write in the checkout gets an environment in the cache directory.
[ -w "$ROOT" ] || VENV=${BONOBOFS_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/bonobofs/venv}

# as_root COMMAND...: run it as root, directly or with sudo.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        sudo -n "$@"
    else
        echo "this needs root: $*" >&2
        return 1
    fi
}

# need_packages [PROGRAM=]PACKAGE...: install the Debian packages that are missing. A package is
# skipped if its program exists.
need_packages() {
    local package missing=()
    command -v dpkg-query >/dev/null || return 0
    for package in "$@"; do
        case $package in
        *=*) command -v "${package%%=*}" >/dev/null && continue ;;
        esac
        package=${package#*=}
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return 0
    echo "installing ${missing[*]}" >&2
    as_root apt-get update -qq >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# need_fuse: fusermount3, libfuse for the portable transport, and a /dev/fuse that every user can open, as udev would
# make it.
need_fuse() {
    command -v fusermount3 >/dev/null || need_packages fuse3
    PATH=$PATH:/sbin ldconfig -p | grep 'libfuse3\.so' >/dev/null || need_packages fuse3
    if [ ! -e /dev/fuse ]; then
        as_root modprobe fuse 2>/dev/null || true
        [ -e /dev/fuse ] || as_root mknod -m 0666 /dev/fuse c 10 229
    fi
    # Without /etc/mtab, as in a new chroot, fusermount3 cannot unmount.
    [ -e /etc/mtab ] || as_root ln -s /proc/self/mounts /etc/mtab
    [ "$(stat -c %a /dev/fuse)" = 666 ] || as_root chmod 0666 /dev/fuse || true
}

# find_python: print the first Python of 3.11 or later.
find_python() {
    local python
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$python"
            return 0
        fi
    done
    echo "Python 3.11 or later is needed" >&2
    return 1
}

# new_python: print a Python that can create virtual environments; install one if there is none.
new_python() {
    local python
    if ! python=$(find_python 2>/dev/null) || ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        need_packages python3 python3-venv ca-certificates
        python=$(find_python)
    fi
    echo "$python"
}

# need_headers: the headers of the environment's Python, for a compiler.
need_headers() {
    local python
    python=$("$VENV/bin/python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
        need_packages "$(basename "$python")-dev"
}

# need_mail: an Agent Mail server in an environment of its own, because it needs other library versions.
need_mail() {
    export BONOBOFS_MAIL_VENV=${BONOBOFS_MAIL_VENV:-$VENV-mail}
    local package=mcp-agent-mail==0.1.0 python mark
    mark=$BONOBOFS_MAIL_VENV/installed-$package
    [ -e "$mark" ] && return 0
    python=$(new_python)
    "$python" -m venv --clear "$BONOBOFS_MAIL_VENV"
    "$BONOBOFS_MAIL_VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$package" >&2
    touch "$mark"
}

# need_tools: package managers for tests/workflows that Debian does not have, of versions that its Node runs.
# setuptools before 70.1 needs the package wheel to build a wheel.
need_tools() {
    export BONOBOFS_TOOLS=${BONOBOFS_TOOLS:-$VENV-tools}
    local mark python
    mark=$BONOBOFS_TOOLS/installed-3
    [ -e "$mark" ] && return 0
    python=$(new_python)
    "$python" -m venv --clear "$BONOBOFS_TOOLS"
    "$BONOBOFS_TOOLS/bin/python" -m pip install --quiet --disable-pip-version-check \
        GitPython nbconvert nox poetry pre-commit 'setuptools>=70.1' tox uv virtualenv >&2
    npm install --prefix "$BONOBOFS_TOOLS" --silent --no-audit --no-fund pnpm@9 vite@5 yarn@2.4.3 >&2
    touch "$mark"
}

# need_venv [EXTRA]: a virtual environment with bonobofs installed in place, renewed when pyproject.toml has changed.
need_venv() {
    local extra=${1:-} python mark
    mark=$VENV/installed-${extra:-plain}
    [ "$mark" -nt "$ROOT/pyproject.toml" ] && return 0
    python=$(new_python)
    "$VENV/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ROOT${extra:+[$extra]}" >&2
    touch "$mark"
}
