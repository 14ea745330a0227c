#!/usr/bin/env bash
# Fetch what profiling/gpu.sh needs and a machine with torch may lack, as wheels for Linux on x86-64,
# into profiling/gpu_wheels/cp312 (cp311 ...: the one argument). For a machine without a network.
set -euo pipefail
tag=${1:-cp312}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=profiling/gpu_wheels/$tag
packages=(annotated-types typing-inspection typing-extensions msgspec submitit cloudpickle nvtx nvidia-nvtx
    isal PyYAML)
options=(--quiet --no-deps --only-binary=:all: --dest "$folder" --python-version "${tag#cp}"
    --implementation cp --abi "$tag" --abi abi3 --abi none)
for glibc in 5 12 17 24 27 28 31 34; do options+=(--platform "manylinux_2_${glibc}_x86_64"); done
for old in 1 2010 2014; do options+=(--platform "manylinux${old}_x86_64"); done

fetch() { "${PYTHON:-python3}" -m pip download "${options[@]}" "$@"; }

rm -rf "$folder"
mkdir -p "$folder"
fetch pydantic "${packages[@]}"
core=$(unzip -p "$folder"/pydantic-[0-9]*.whl '*/METADATA' |
    sed -n 's/^Requires-Dist: \(pydantic-core==[^ ;]*\).*/\1/p')
fetch "$core" # this release and no other
du -ch --apparent-size -- "$folder"/*.whl
