#!/usr/bin/env bash
# What the comparison needs beyond the project itself: Lightning and transformers, in an environment of their own that
# sees all of .venv (so that torch is the same one, and no other is fetched). About 230 MB, half a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x $python ] || { echo "compare: there is no .venv; run make setup first" >&2; exit 1; }
bench=.venv/compare
$python -m venv "$bench"
site=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
bench_site=$("$bench/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$site')" > "$bench_site/project.pth"
torch=$($python -c 'import importlib.metadata as m; print(m.version("torch"))')
echo "torch==$torch" > "$bench/constraints.txt"
"$bench/bin/python" -m pip install -qq --disable-pip-version-check -c "$bench/constraints.txt" lightning transformers accelerate
"$bench/bin/python" -c 'import importlib.metadata as m; print("compare:", *(f"{n} {m.version(n)}" for n in ("torch", "lightning", "transformers", "accelerate")))'
