"""How long three ranks take to form a generation, by each engine that the torch here has: a real
coordinator, three processes of this machine, gloo.

The engines take turns, ten generations each, in the same processes; what it costs to change the
engine is in none of them. `*_ms`: from a barrier of the old generation to the return of `form` on
the first rank, the median over all rounds. `*_ratio`: of a round's median to that of `in_place` in
the same round, the median over the rounds.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from typing import Any

from harness import finish, options, scratch

from hydroslurm.elastic.engine import IN_PROCESS, missing

from elasticstory import ElasticStory  # isort: skip - harness puts tests/ on the path

GENERATIONS = 10
PROGRAM = """
    import dataclasses, json, os, sys, time
    import torch, torch.distributed as dist
    from hydroslurm.elastic.engine import IN_PROCESS
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.elastic.member import Member

    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    member = Member(ElasticFolder(run=ElasticFolder.at(os.environ["HYDROSLURM_ELASTIC"])),
                    name=os.environ["HYDROSLURM_MEMBER"])
    member.start()
    first = member.begin(stop=lambda: False)
    groups = [IN_PROCESS[name](member, backend="gloo") for name in options["engines"]]
    generation, former = first.generation, None
    for _ in range(options["rounds"]):
        for group in groups:
            if former is not None:
                former.destroy()
            former, times_s = group, []
            for number in range(options["generations"] + 1):
                if number:
                    dist.barrier()
                form = dataclasses.replace(first, generation=generation)
                generation += 1
                began_s = time.perf_counter()
                group.form(form)
                times_s.append(time.perf_counter() - began_s)
                assert (dist.get_rank(), dist.get_world_size()) == (first.rank, first.world_size)
            if first.rank == 0:
                print("TIMES", json.dumps({"engine": group.engine, "times_s": times_s[1:]}))
    former.destroy()
    print("DONE", json.dumps({}))
    sys.stdin.readline()
"""


def main() -> None:
    chosen = options(__doc__)
    rounds = 2 if chosen.quick else 4  # the coordinator clears its store at changes of its own only
    engines = [name for name in IN_PROCESS if not missing(name, "gloo")]
    with scratch("forming", chosen) as folder:
        times = measure(folder, engines, rounds)
    medians = {name: [statistics.median(one) for one in each] for name, each in times.items()}
    result: dict[str, Any] = {"rounds": rounds, "ranks": 3}
    for name, each in times.items():
        result[f"{name}_ms"] = round(
            1000 * statistics.median(itertools.chain.from_iterable(each)), 3
        )
        ratios = [one / two for one, two in zip(medians[name], medians["in_place"], strict=True)]
        result[f"{name}_ratio"] = round(statistics.median(ratios), 3)
    finish(chosen, "forming a generation", result)


def measure(folder: Any, engines: Sequence[str], rounds: int) -> dict[str, list[list[float]]]:
    """Engine -> round -> seconds of each generation."""
    story = ElasticStory(folder, program=PROGRAM, max=3)
    told = {"engines": engines, "rounds": rounds, "generations": GENERATIONS}
    try:
        for name in "abc":
            story.start(name, **told)
        for name in "abc":
            story.members[name].expect("DONE ")
        times: dict[str, list[list[float]]] = {name: [] for name in engines}
        for child in story.members.values():
            for line in child.lines:
                if line.startswith("TIMES "):
                    said = json.loads(line[6:])
                    times[said["engine"]].append(said["times_s"])
        return times
    finally:
        story.close()


if __name__ == "__main__":
    main()
