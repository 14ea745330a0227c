"""A member of an elastic run that trains nothing: it counts steps, in step with the others, hands
its count over to newcomers, and leaves as a rank does. It starts in a tenth of a training's time,
so that a real Slurm's part in a run can be tested many times.

    member.py [NODE...]     on these nodes it fails as soon as it has joined

It ends at the step that the file `until` beside it names.
"""

import os
import signal
import sys
import time
from pathlib import Path

from hydroslurm.core.rundir import ELASTIC_ENV
from hydroslurm.elastic.folder import ElasticFolder, member_name
from hydroslurm.elastic.member import Member
from hydroslurm.elastic.roster import Depart, Finished, Form, Save

HERE = Path(__file__).parent
NODE = os.environ.get("SLURMD_NODENAME", "")
STEP_S = 0.05
seen: list[int] = []
for number in (signal.SIGTERM, signal.SIGURG, signal.SIGTSTP):
    signal.signal(number, lambda signo, _: seen.append(signo))

folder = ElasticFolder(run=Path(os.environ[ELASTIC_ENV]))
name = member_name(os.environ)
member = Member(folder, name=name, node=NODE, stop=lambda: bool(seen))
member.start()
step = -1


def obey(directive: object) -> None:
    """Until this member goes on."""
    global step
    while True:
        if isinstance(directive, Form):
            if directive.fresh:
                step = max(step, 0)
            if directive.rank == directive.source:
                member.set_value("step", str(step).encode())
            elif directive.rank in directive.needs:
                step = int(member.get_values(["step"])[0])
            member.formed(directive, ok=True)
            print(f"generation {directive.generation} of {directive.members} at {step}", flush=True)
            return
        if isinstance(directive, Save):
            member.saved(directive)
        elif isinstance(directive, Finished):
            member.done()
            print(f"finished at {step}", flush=True)
            sys.exit(0)
        else:
            assert isinstance(directive, Depart)
            member.close()
            print(f"left at {step}: {directive.reason}", flush=True)
            sys.exit(75 if seen or directive.again else int(directive.failed))
        directive = member.again()


obey(member.begin())
if NODE in sys.argv[1:]:
    print("fails", flush=True)
    sys.exit(3)
while True:
    time.sleep(STEP_S)
    step += 1
    until = HERE / "until"
    final = until.exists() and step >= int(until.read_text())
    if seen:
        member.leave(signal.Signals(seen[0]).name)
    directive = member.safe_point(step, final=final)
    if directive is not None:
        obey(directive)
