"""Run every profiling script, keep its figures in profiling/results/, and update the tables in
README and docs/.

    bench.py                    everything but the comparison, about forty minutes
    bench.py --only finish      one of them: the comparison's minutes until done, in 8 minutes
    bench.py --only compare     the rest of the comparison, in half an hour
    bench.py --readme           only the tables, from the results that are there
    bench.py --quick --out DIR  to see that it all runs; changes no page
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from compare import table as compare_table
from readme_table import ROWS, headlines, kept, load, replace_between, table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ROOT = HERE.parent
SCRIPTS = tuple(dict.fromkeys([*(row.script for row in ROWS), *compare_table.BLOCKS]))
LIMIT_S = 3600.0


def run(name: str, *, quick: bool, out: Path) -> bool:
    """Run one script and keep its JSON; whether it worked."""
    print(f"{name} ...", flush=True)
    of_comparison = {"compare": ["compare/run.py"], "finish": ["compare/run.py", "--finish"]}
    script, *more = of_comparison.get(name, [f"{name}.py"])
    argv = [sys.executable, str(HERE / script), *more, "--json", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        print(f"{name}: failed: {error}", file=sys.stderr)
        return False
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"{name}.json.tmp"
    result = result if name in compare_table.BLOCKS else kept(name, result)
    part.write_text(json.dumps(result) + "\n")
    part.replace(out / f"{name}.json")
    for key, value in result.items():
        if key not in ("script", "environment"):
            print(f"  {key:<42} {value}")
    return True


def update_pages(root: Path, results: Path) -> None:
    """Rewrite what is between the markers in README, the figures' page and the comparison's."""
    found = load(results)
    readme, figures = root / "README.md", root / "docs/performance.md"
    readme.write_text(replace_between(readme.read_text(), headlines(found)))
    figures.write_text(replace_between(figures.read_text(), table(found)))
    page = root / "docs/comparison.md"
    for name in compare_table.BLOCKS.keys() & found.keys():
        between = {"begin": f"<!-- {name} -->", "end": f"<!-- /{name} -->"}
        block = compare_table.table(found[name], compare_table.BLOCKS[name])
        page.write_text(replace_between(page.read_text(), block, **between))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few rounds; no page is changed")
    parser.add_argument("--only", choices=SCRIPTS, action="append", help="may be given again")
    parser.add_argument("--readme", action="store_true", help="run nothing, rewrite the tables")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    chosen = parser.parse_args()
    if chosen.quick and chosen.out == RESULTS and not chosen.readme:
        parser.error("--quick measures nothing worth keeping; give it an --out of its own")
    wanted = (
        ()
        if chosen.readme
        else chosen.only or [name for name in SCRIPTS if name not in compare_table.BLOCKS]
    )
    failed = [name for name in wanted if not run(name, quick=chosen.quick, out=chosen.out)]
    if not chosen.quick and chosen.out == RESULTS:
        update_pages(ROOT, RESULTS)
        if "compare" in wanted:
            compare_table.draw(load(RESULTS)["compare"], ROOT / "docs/images/compare.png")
        print("README.md and docs/ have the new figures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
