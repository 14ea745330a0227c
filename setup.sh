#!/usr/bin/env bash
# Bring this machine to where `make demo` and `make test` work: system packages, .venv, torch, the package.
# Idempotent; the second run takes under a second. Called by the Makefile, safe to call by hand.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.10 or newer)
#   TORCH=torch==2.6.0  another torch than the one in constraints.txt (a requirement, a wheel or a folder)
#   TORCH_INDEX=URL     one more index to look for torch in, for example that of PyTorch's CPU wheels
#   NO_SYSTEM=1         leave system packages alone
#   NO_NSYS=1           do without NVIDIA's nsys (170 MB); the tests that profile a job are then skipped
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
/usr/bin/python3 python3
tmux tmux
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

# --- nsys ----------------------------------------------------------------------------------------------------
# NVIDIA's profiler, which records the marks of a job on machines without a GPU too. Debian has it in non-free. It is
# unpacked below .venv and not installed: apt would bring NVIDIA's driver and the diversion of libGL with it. So it takes
# no root, and what apt knows and where it looks stay as they are; its lists for this are kept in a folder of their own.
nsys_profiler() {
    local home=.venv/nsight-systems
    [ -z "${NO_NSYS:-}" ] || return 0
    if command -v nsys >/dev/null || [ -x .venv/bin/nsys ]; then return 0; fi
    # what could not be had is not tried on every run again
    if [ -s $home/why-not ] && [ "${HYDROSLURM_REQUIRE_SLURM:-}" != 1 ]; then
        say "nsys was not to be had ($(cat $home/why-not)); to try again: rm -r $home"
        return 0
    fi
    rm -rf $home
    mkdir -p $home .venv/bin
    if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
        echo "no apt-get here: put NVIDIA's nsys on PATH" >$home/why-not
    elif nsys_unpack "$PWD/$home" >$home/log 2>&1; then
        ln -sf ../nsight-systems/usr/bin/nsys .venv/bin/nsys
        rm -f $home/log
        return 0
    else
        tail -n 1 $home/log >$home/why-not
        [ -s $home/why-not ] || echo "apt-get or dpkg failed" >$home/why-not
    fi
    say "no nsys ($(cat $home/why-not)); jobs run without it, and the tests that profile one say that they were skipped"
}

# Two packages of non-free, and two small libraries that its importer wants and that it has no copy of. The packages lack
# the last link, without which the importer is not found. In a shell of its own: its trap ends with it.
nsys_unpack() (
    home=$1
    work=$(mktemp -d) && mkdir -p "$work"/{sources,lists/partial,cache/archives/partial} || exit 1
    trap 'rm -rf "$work"' EXIT
    cp /etc/apt/sources.list "$work/sources/main.list" 2>/dev/null || :
    cp /etc/apt/sources.list.d/*.{list,sources} "$work/sources/" 2>/dev/null || :
    find "$work/sources" -type f -exec sed -i -E \
        '/^(Components:|deb ).* main( |$)/{/ non-free( |$)/!s/$/ non-free/}' {} +
    cp /var/lib/apt/lists/*_{InRelease,Release,Release.gpg,Packages*} "$work/lists/" 2>/dev/null || :
    apt=(apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources"
        -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o Acquire::Retries=3 -o APT::Sandbox::User=)
    "${apt[@]}" update || exit 1
    cd "$work" && "${apt[@]}" download nsight-systems nsight-systems-target libssh-4 libpfm4 || exit 1
    for package in *.deb; do
        # the browser of its window is half of all and is not needed
        dpkg --fsys-tarfile "$package" |
            tar -x -C "$home" --no-same-owner --exclude=./usr/share/doc --exclude='*/libQt6WebEngine*' &
    done
    wait
    cd "$home"/usr/lib/*/nsight-systems || exit 1
    ln -sfn ../../nsight-systems/host-linux-x64 host-linux-x64
    ln -sf "../../$(basename "$(dirname "$PWD")")/libpfm.so.4" host-linux-x64/
    ! ldd host-linux-x64/QdstrmImporter | grep 'not found' || exit 1
    "$home/usr/bin/nsys" --version
)

choose_python
system_packages
nsys_profiler & # takes as long as pip, and both wait for the network half of it
python_packages
wait $!
