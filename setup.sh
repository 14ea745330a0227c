#!/usr/bin/env bash
# Bring this machine to where `make demo` and `make test` work: system packages, .venv, torch, the package.
# Idempotent; the second run takes under a second. Called by the Makefile, safe to call by hand.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.10 or newer)
#   TORCH=torch==2.6.0  another torch than the one in constraints.txt (a requirement, a wheel or a folder)
#   TORCH_INDEX=URL     one more index to look for torch in, for example that of PyTorch's CPU wheels
#   NO_SYSTEM=1         leave system packages alone
set -euo pipefail
cd "$(dirname "$0")"

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# --- system packages --------------------------------------------------------------------------------------
# Each line: a program or file that must be found, and the Debian package that brings it. Slurm's daemons are used by
# `hydroslurm cluster` only, which starts its own private ones; mariadb-server-core is the bare server without
# a system service.
needs() {
    cat <<'LIST'
g++ g++
slurmctld slurmctld
slurmd slurmd
squeue slurm-client
slurmdbd slurmdbd
munged munge
mariadbd mariadb-server-core
/usr/include/slurm/spank.h libslurm-dev
LIST
}

# `command -v` of an absolute path asks whether it can be executed; a header cannot
find_program() { [ -e "$1" ] || PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin" command -v "$1" >/dev/null 2>&1; }

missing_packages() {
    local program package
    while read -r program package; do
        find_program "$program" || echo "$package"
    done < <(needs)
    # the gate loads into any Python, but .venv needs the venv module of this one
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

# Debian starts a service when its package is installed. Nothing here needs one: the dev cluster runs its own
# daemons in its own folder. So the standard veto stands while apt runs, unless the site has its own.
apt_install() {
    local veto=/usr/sbin/policy-rc.d as=()
    [ "$(id -u)" = 0 ] || as=(sudo -n)
    local placed=
    if [ ! -e $veto ]; then
        printf '#!/bin/sh\nexit 101\n' | "${as[@]}" tee $veto >/dev/null
        "${as[@]}" chmod 755 $veto
        placed=1
        trap '"${as[@]}" rm -f '"$veto" EXIT
    fi
    local quiet=(-qq -o=Dpkg::Use-Pty=0 -y --no-install-recommends)
    "${as[@]}" apt-get update -qq || say "apt-get update failed; going on with the package lists that are there"
    local log ok=0
    log=$(mktemp)
    "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install "${quiet[@]}" "$@" >"$log" 2>&1 || ok=$?
    [ $ok = 0 ] || tail -n 20 "$log" >&2
    rm -f "$log"
    if [ -n "$placed" ]; then
        "${as[@]}" rm -f $veto
        trap - EXIT
    fi
    return $ok
}

system_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ -z "${NO_SYSTEM:-}" ] && command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then
        say "installing system packages: ${missing[*]} (their services are not started)"
        apt_install "${missing[@]}" && return 0
        say "apt-get could not install them"
    fi
    say "these system packages are missing and cannot be installed from here: ${missing[*]}"
    say "ask for:  sudo apt-get install -y --no-install-recommends ${missing[*]}"
    say "without Slurm the demo still runs as a local process, and the Slurm tests say that they were skipped"
}

# --- Python ------------------------------------------------------------------------------------------------
choose_python() {
    if [ -z "${PYTHON:-}" ]; then
        for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
                PYTHON=$candidate
                break
            fi
        done
    fi
    [ -n "${PYTHON:-}" ] || die "no Python 3.10 or newer found; install one (apt-get install python3) or name it: PYTHON=/path/to/python3 make demo"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        die "PYTHON=$PYTHON is not a Python of version 3.10 or newer"
}

python_packages() {
    local torch=${TORCH:-} stamp=.venv/.setup want
    want=$( { cat pyproject.toml constraints.txt setup.sh; echo "$torch" "$PYTHON"; pwd; } | sha256sum )
    if [ -x .venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$want" ]; then return 0; fi
    say "making .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv .venv || die "$PYTHON -m venv failed; on Debian and Ubuntu: sudo apt-get install -y python3-venv"
    local pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check)
    local constraints=constraints.txt
    if [ -n "$torch" ]; then
        constraints=.venv/constraints.txt
        grep -v '^torch' constraints.txt > $constraints
    fi
    local index=()
    [ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
    say "installing ${torch:-torch (see constraints.txt)}"
    "${pip[@]}" "${index[@]}" -c $constraints "${torch:-torch}"
    say "installing hydroslurm and its tools"
    "${pip[@]}" -c $constraints -e '.[dev]'
    echo "$want" > $stamp
}

choose_python
system_packages
python_packages
