#!/usr/bin/env bash
# Run a command beside another Slurm, without installing it: slurms.sh SUITE COMMAND...
#
# SUITE is a Debian suite (trixie has Slurm 24.11, sid 26.05). Its Slurm and the libraries below it are fetched with an apt folder
# of their own, 30 MB, into build/slurms/SUITE, and unpacked over an overlay of / whose writes go to memory, in a mount namespace
# that ends with the command. The system's packages, files and package lists stay as they are. Needs root, Debian and a network.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
suite=$1
shift
cd "$(dirname "$0")/.."
repository=$PWD
home=$repository/build/slurms/$suite
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins slurmdbd munge libslurm-dev)

fetch() {
    mkdir -p "$home"/{lists,archives}/partial
    : >"$home/status" # nothing is installed, so that every library comes along
    # from where this machine has its own packages
    local archive codename
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    archive=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' | awk -v release="$codename" '$2 == release { print $1; exit }')
    [ -n "$archive" ] || { echo "apt knows no archive of ${codename:-this system}: is this Debian, and was apt-get update run?" >&2; return 1; }
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite main" >"$home/sources.list"
    local apt=(apt-get -qq -y --no-install-recommends
        -o "Dir::Etc::sourcelist=$home/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::status=$home/status"
        -o "Dir::State::lists=$home/lists" -o "Dir::Cache::archives=$home/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
    "${apt[@]}" update
    "${apt[@]}" --download-only install "${packages[@]}" >"$home/log" 2>&1 || { cat "$home/log" >&2; return 1; }
    touch "$home/fetched"
}

# In the namespace. What Slurm's programs load stands in folders by name, so the plugins of the Slurm below go first.
enter() {
    local memory=/mnt root=/mnt/root deb
    mount -t tmpfs -o mode=755 slurms $memory
    mkdir $memory/{upper,work,root}
    mount -t overlay -o "lowerdir=/,upperdir=$memory/upper,workdir=$memory/work" slurms $root
    rm -rf $root/usr/lib/*/slurm* $root/usr/lib/*/libslurm*
    for deb in "$home"/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C $root
    done
    for place in proc sys dev tmp; do mount --rbind /$place $root/$place; done
    chroot $root ldconfig
    exec chroot $root /usr/bin/env -C "$repository" "$@"
}

if [ "${SLURMS_INSIDE:-}" = "$suite" ]; then
    enter "$@"
fi
[ -e "$home/fetched" ] || fetch
SLURMS_INSIDE=$suite exec unshare --mount --propagation private "$0" "$suite" "$@"
