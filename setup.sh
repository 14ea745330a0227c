#!/usr/bin/env bash
# Bring this machine to where `make demo` and `make test` work: setup.sh [demo|test], default test.
# demo takes Slurm, torch and this package; test also what tests, lint, docs and profiles need.
# Idempotent; the second run takes under a second. Called by the Makefile, safe to call by hand.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.10 or newer)
#   TORCH=torch==2.6.0  another torch than the one in constraints.txt (a requirement, a wheel or a folder)
#   TORCH_INDEX=URL     one more index to look for torch in, for example that of PyTorch's CPU wheels
#   NO_SYSTEM=1         leave system packages alone
#   NO_NSYS=1           do without NVIDIA's nsys (170 MB); the tests that profile a job are then skipped
set -euo pipefail
cd "$(dirname "$0")"
exec 9<setup.sh && flock 9 # one at a time: make -j starts several
purpose=${1:-test}

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
[[ $purpose =~ ^(demo|test)$ ]] || die "the purpose is $purpose; it must be demo or test"

# Run a command: its output on a terminal; elsewhere its last line every 20 s, and the end of all when it fails.
show() {
    say "$1"
    local what=$1 log began=$SECONDS status=0
    shift
    if [ -t 1 ]; then "$@"; return; fi
    log=$(mktemp)
    "$@" >"$log" 2>&1 &
    while kill -0 $! 2>/dev/null; do
        sleep 1
        [ $(((SECONDS - began) % 20)) != 19 ] || say "$what: $((SECONDS - began + 1)) s; $(tail -n 1 "$log" | cut -c1-100)"
    done
    wait $! || status=$?
    [ $status = 0 ] || tail -n 20 "$log" >&2
    rm -f "$log"
    return $status
}

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
ip iproute2
LIST
}

# `command -v` of an absolute path asks whether it can be executed; a header cannot
find_program() { [ -e "$1" ] || [ -e ".venv/slurm$1" ] || PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin:$PWD/.venv/bin" command -v "$1" >/dev/null 2>&1; }

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
    local veto=/usr/sbin/policy-rc.d as=() placed=
    [ "$(id -u)" = 0 ] || as=(sudo -n)
    if [ ! -e $veto ]; then
        printf '#!/bin/sh\nexit 101\n' | "${as[@]}" tee $veto >/dev/null
        "${as[@]}" chmod 755 $veto
        placed=1
        trap '"${as[@]}" rm -f '"$veto" EXIT
    fi
    "${as[@]}" apt-get update -qq || say "apt-get update failed; going on with the package lists that are there"
    local ok=0
    show "installing system packages: $* (their services are not started)" \
        "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -o=Dpkg::Use-Pty=0 -y --no-install-recommends "$@" || ok=$?
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
        apt_install "${missing[@]}" && return 0
    fi
    private_slurm
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} = 0 ] || say "missing; ask an admin for:  sudo apt-get install -y --no-install-recommends ${missing[*]}"
}

# --- packages without root ------------------------------------------------------------------------------------
# unpack_packages FOLDER alone|whole PACKAGE...  unpacks Debian packages, with `whole` those of their dependencies that this machine
# lacks, too. apt's lists and sources stay as they are; non-free is added to copies. A subshell, so that its trap ends with it.
unpack_packages() (
    home=$1 extent=$2
    shift 2
    work=$(mktemp -d) && mkdir -p "$home" "$work"/{sources,lists/partial,cache/archives/partial} || exit 1
    trap 'rm -rf "$work"' EXIT
    cp /etc/apt/sources.list "$work/sources/main.list" 2>/dev/null || :
    cp /etc/apt/sources.list.d/*.{list,sources} "$work/sources/" 2>/dev/null || :
    find "$work/sources" -type f -exec sed -i -E \
        '/^(Components:|deb ).* main( |$)/{/ non-free( |$)/!s/$/ non-free/}' {} +
    cp /var/lib/apt/lists/*_{InRelease,Release,Release.gpg,Packages*} "$work/lists/" 2>/dev/null || :
    apt=(apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources"
        -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o Acquire::Retries=3 -o APT::Sandbox::User=)
    "${apt[@]}" update || exit 1
    [ "$extent" = alone ] || set -- $("${apt[@]}" -s install --no-install-recommends "$@" | awk '$1 == "Inst" { print $2 }')
    cd "$work" && "${apt[@]}" download "$@" || exit 1
    for package in *.deb; do
        # the browser of nsys' window is half of all and is not needed
        dpkg --fsys-tarfile "$package" |
            tar -x -C "$home" --no-same-owner --keep-directory-symlink --exclude=./usr/share/doc --exclude='*/libQt6WebEngine*' &
    done
    wait
)

# Slurm below .venv, for a user who cannot install it. Its programs and plugins look for libraries below /usr: each is started by
# a script of its name that says where they are. lib/slurm is where `hydroslurm cluster` finds the plugins.
private_slurm() {
    local home=$PWD/.venv/slurm/usr wanted program name libraries
    # all of it, even where the site has some: its release may be another
    mapfile -t wanted < <(needs | awk '/slurm|munge|mariadb/ { print $2 }')
    missing_packages | grep -qE '^(slurm|munge|mariadb)' && command -v apt-get >/dev/null || return 0
    rm -rf .venv/slurm
    mkdir -p .venv/bin
    show "unpacking Slurm below .venv, about 50 MB, for private clusters of this user" \
        unpack_packages "$PWD/.venv/slurm" whole "${wanted[@]}" && [ -d "$home/lib" ] || return 0
    libraries=$(find "$home/lib" -name 'lib*.so*' -printf '%h\n' | sort -u | paste -sd:)
    mkdir -p "$home/libexec"
    for program in "$home"/{bin,sbin}/*; do
        name=$(basename "$program" -wlm) # by which Slurm's daemons know what they are
        mv "$program" "$home/libexec/$name"
        program=${program%-wlm}
        printf '#!/bin/sh\nLD_LIBRARY_PATH="%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "%s" "$@"\n' \
            "$libraries" "$home/libexec/$name" >"$program"
        chmod +x "$program"
        ln -sf "../${program#"$PWD/.venv/"}" .venv/bin/
    done
    ln -sfn "$(cd "$home/lib" && echo */slurm-wlm)" "$home/lib/slurm"
}

# NVIDIA's profiler, which records the marks of a job on machines without a GPU too. Debian has it in non-free. It is unpacked and
# not installed: apt would bring NVIDIA's driver and the diversion of libGL with it.
nsys_profiler() {
    local home=.venv/nsight-systems
    [ -z "${NO_NSYS:-}" ] && [ $purpose = test ] || return 0
    if command -v nsys >/dev/null || [ -x .venv/bin/nsys ]; then return 0; fi
    # what could not be had is not tried on every run again
    if [ -s $home/why-not ] && [ "${HYDROSLURM_REQUIRE_SLURM:-}" != 1 ]; then
        say "nsys was not to be had ($(cat $home/why-not)); to try again: rm -r $home"
        return 0
    fi
    rm -rf $home
    mkdir -p $home
    if nsys_unpack "$PWD/$home" >$home/log 2>&1; then
        ln -sf ../nsight-systems/usr/bin/nsys .venv/bin/nsys
        rm -f $home/log
        return 0
    fi
    tail -n 1 $home/log >$home/why-not
    [ -s $home/why-not ] || echo "apt-get or dpkg failed" >$home/why-not
    say "no nsys ($(cat $home/why-not)); jobs run without it, and the tests that profile one say that they were skipped"
}

# Two small libraries that its importer wants come along. The packages lack the last link, without which it is not found.
nsys_unpack() (
    unpack_packages "$1" alone nsight-systems nsight-systems-target libssh-4 libpfm4 || exit 1
    cd "$1"/usr/lib/*/nsight-systems || exit 1
    ln -sfn ../../nsight-systems/host-linux-x64 host-linux-x64
    ln -sf "../../$(basename "$(dirname "$PWD")")/libpfm.so.4" host-linux-x64/
    ! ldd host-linux-x64/QdstrmImporter | grep 'not found' || exit 1
    "$1/usr/bin/nsys" --version
)

# --- Python ------------------------------------------------------------------------------------------------
choose_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            PYTHON=$candidate
            return
        fi
    done
    [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python of version 3.10 or newer"
    die "no Python 3.10 or newer found; install one (apt-get install python3) or name it: PYTHON=/path/to/python3 make demo"
}

python_packages() {
    local torch=${TORCH:-} want extra=$purpose options=() index=() constraints=constraints.txt cpu stamp
    want=$( { cat pyproject.toml constraints.txt setup.sh; echo "$torch" "$PYTHON"; pwd; } | sha256sum )
    # what the tests need is more than what the demo needs
    for stamp in .venv/.setup-test .venv/.setup-$purpose; do
        if [ -x .venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$want" ]; then return 0; fi
    done
    [ $purpose = test ] && extra=dev || extra=examples
    local usable='import sys, torch; v = torch.__version__; print(f"torch=={v}")
assert sys.prefix == sys.base_prefix and tuple(map(int, v.split(".")[:2])) >= (2, 4)'
    if [ -z "$torch" ] && [ $purpose = demo ] && torch=$("$PYTHON" -c "$usable" 2>/dev/null); then
        options=(--system-site-packages)
        say "using the ${torch/==/ } of $PYTHON"
    fi
    say "making .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv "${options[@]}" .venv || die "$PYTHON -m venv failed; on Debian and Ubuntu: sudo apt-get install -y python3-venv"
    local pip=(.venv/bin/python -m pip --disable-pip-version-check)
    [ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
    if [ -z "$torch" ] && [ $purpose = demo ]; then
        # constraints.txt takes a CPU build of its version by itself, because that counts as newer; else one of another version
        cpu=$("${pip[@]}" index versions torch "${index[@]}" 2>/dev/null | grep -oE '[0-9.]+\+cpu' || :)
        grep -qxF "$(sed -n 's/^torch==//p' constraints.txt)+cpu" <<<"$cpu" || torch=${cpu:+torch==${cpu%%$'\n'*}}
    fi
    if [ -n "$torch" ]; then
        constraints=.venv/constraints.txt
        grep -v '^torch' constraints.txt > $constraints
    fi
    local wanted=("${index[@]}" -c $constraints "${torch:-torch}" -e ".[$extra]")
    "${pip[@]}" install --quiet --upgrade pip 2>/dev/null || say "pip stays as it is"
    say "looking up what is to be downloaded"
    "${pip[@]}" install --quiet --dry-run --report - "${wanted[@]}" 2>/dev/null | .venv/bin/python -c "$SIZES" 2>/dev/null ||
        say "how large the downloads are cannot be told here"
    show "installing hydroslurm for the $purpose" "${pip[@]}" install "${wanted[@]}" || die "pip could not install what the $purpose needs"
    echo "$want" > .venv/.setup-$purpose
}

# What pip is about to download, from its report
SIZES='
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

def megabytes(url):
    if url.startswith("file:"):
        path = unquote(urlsplit(url).path)
        return os.path.getsize(path) / 1e6 if os.path.isfile(path) else 0
    with urlopen(Request(url, method="HEAD"), timeout=30) as answer:
        return int(answer.headers["Content-Length"]) / 1e6

chosen = {one["metadata"]["name"]: one["download_info"]["url"] for one in json.load(sys.stdin)["install"]}
with ThreadPoolExecutor(16) as pool:
    sizes = dict(zip(chosen, pool.map(megabytes, chosen.values())))
largest = sorted(sizes, key=sizes.get, reverse=True)[:3]
print(f"setup: {len(sizes)} packages, {sum(sizes.values()):.0f} MB unless cached:", *(f"{name} {sizes[name]:.0f} MB," for name in largest), "...")
if any(name.startswith("nvidia-cu") for name in sizes):
    print("setup: only a torch for CUDA can be had here, which makes most of that. With a CPU build, of 200 MB, the demo is the same:")
    print("setup: name an index or a folder that has one with TORCH_INDEX=URL, or a wheel with TORCH=FILE")'

choose_python
system_packages
mkdir -p .venv/bin
nsys_profiler & # takes as long as pip, and both wait for the network half of it
nsys=$!
python_packages
wait $nsys
