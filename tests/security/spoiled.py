"""Run folders full of what should not be there, one for each kind of attack."""

from __future__ import annotations

from pathlib import Path

SPOIL = r"""
    import json, os, sys, time
    from pathlib import Path

    home = Path(sys.argv[1])
    NOW = time.time_ns()
    EVENT = {"v": 1, "mono_ns": 5, "epoch_ns": NOW, "rank": 0, "job_id": None,
             "restart_count": 0, "pid": 7, "host": "n1", "step": 3, "data": {}}
    NASTY = ("\x1b[2J\x1b]0;owned\x07\u202e$\\frac{$ <script>alert(1)</script> [bold] "
             "\0\n\x9b")
    FILES = ["events/rank-00000.jsonl", "events/rank-00001.jsonl",
             "events/agent-00000.jsonl", "events/rank-00000.json", "attempts.jsonl",
             "conditions.jsonl", "submission.json", "plan.json", "job.yaml", "finished.json",
             "tensorboard.json", "active.json", "starts.jsonl", "logs/task-0.log",
             "profile/rank-0-restart-0.sqlite",
             "checkpoints/step-000000001/manifest.json", "checkpoints/step-000000002",
             "checkpoints/step-000000003/manifest.json"]

    def make(name, put):
        for file in FILES:
            path = home / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            put(path)

    def line(**words):
        return json.dumps({**EVENT, **words})

    def lines(*several):
        return "".join(one + "\n" for one in several).encode("utf-8", "surrogatepass")

    make("fifos", os.mkfifo)
    make("devices", lambda path: path.symlink_to("/dev/zero"))
    make("folders", Path.mkdir)

    def endless(path):
        with path.open("wb") as file:
            file.truncate(1 << 42)

    make("endless", endless)
    make("deep", lambda path: path.write_bytes(b"[" * 200_000 + b"\n" + b'{"v":' * 200_000 + b"\n"))
    # what a pattern for strings goes over from each quote to the end
    unclosed = b"[" * 70 + b'"' + b'\\"' * 30_000 + b"\n"
    make("unclosed", lambda path: path.write_bytes(unclosed * 20))
    BIG = "9" * 400
    numbers = lines(
        line(kind="installed"),
        *(line(kind=kind, **{key: "@"}).replace('"@"', value)
          for kind in ("installed", "parked", "save_committed", "workers_started", "all_parked")
          for key in EVENT for value in (BIG, "-" + BIG, "1e999", "NaN", '"text"', "[]", "{}")),
        *(line(kind=kind, data={key: "@"}).replace('"@"', value)
          for kind in ("parked", "resumed", "attempt_began", "save_committed", "ranks_joined",
                       "workers_started", "agent_left", "causes_changed", "stop_requested")
          for key in ("park_us", "pause", "world_size", "causes", "checkpoint_step", "step",
                      "seconds", "pids", "state", "counts", "requested_mono_ns", "held")
          for value in (BIG, "1e308", "Infinity", '"text"', "[[1]]", '{"a": []}', "null", "-1")),
    )
    make("numbers", lambda path: path.write_bytes(numbers))
    STATUS = {"v": 1, "rank": 0, "state": "parked", "since": [5, NOW], "started": [5, NOW],
              "as_of": [5, NOW], "host": "n1", "boot_id": "", "pid": 7, "job_id": 7,
              "restart_count": 0, "causes": [], "request_mono_ns": 4, "pauses": 1, "park_us": 1.0,
              "held": 1, "world_size": 1, "all_parked": None, "in_flight": 0, "step": 3,
              "step_since": [5, NOW], "steps_per_s": 1.0, "heartbeat_s": 1.0, "saver": "",
              "saver_restart_count": 0, "attempt_step": 0, "attempt_began": [5, NOW],
              "attempt_restart_count": 0, "committed_step": 2, "committed": [5, NOW],
              "save_s": 1.0, "not_copied": None, "preempted": [[0, NOW]], "finished": False,
              "pause_counts": [0] * 10, "pause_sum_s": 0.0}

    def status(name, **words):
        (home / name / "events/rank-00000.json").write_text(json.dumps({**STATUS, **words}))

    MOST = (1 << 63) - 1
    status("numbers", step=-MOST, since=[MOST, MOST], as_of=[1, 0], step_since=[0, MOST],
           steps_per_s=9e11, heartbeat_s=9e11, pauses=MOST, park_us=-9e19, resume_us=-9e19,
           held=MOST, in_flight=MOST, request_mono_ns=MOST, committed_step=MOST,
           committed=[MOST, MOST], save_s=9e11, attempt_step=-MOST, pause_counts=[MOST] * 10)
    words = lines(
        line(kind="installed", host=NASTY),
        line(kind="attempt_began", host=NASTY, data={"attempt": 1, "step": 0}),
        line(kind="gate_closed", host=NASTY, data={"pause": 1, "causes": [NASTY]}),
        line(kind="first_operator_held", host=NASTY, data={"pause": 1, "operator": NASTY}),
        line(kind="parked", host=NASTY,
             data={"pause": 1, "park_us": 1.0, "causes": [NASTY], "world_size": 1}),
        line(kind="stop_requested", host=NASTY, data={"signal": NASTY}),
        line(kind="stop_reason", host=NASTY, data={"reason": NASTY, "message": NASTY}),
        line(kind="attempt_ended", host=NASTY, data={"ending": NASTY}),
        line(kind="installed", host=NASTY, pid=8, mono_ns=9),
        line(kind="gate_closed", host=NASTY, pid=8, mono_ns=10,
             data={"pause": 1, "causes": [NASTY]}),
        line(kind="parked", host=NASTY, pid=8, mono_ns=11,
             data={"pause": 1, "park_us": 1.0, "causes": [NASTY]}),
    )
    make("words", lambda path: path.write_bytes(words))
    status("words", host=NASTY, causes=[NASTY], not_copied=NASTY, boot_id=NASTY, requeue=NASTY)
    condition = {"v": 1, "type": "Running", "epoch_ns": NOW, "reason": NASTY, "message": NASTY}
    (home / "words/conditions.jsonl").write_text(json.dumps(condition) + "\n")
    dollars = home / "$\\frac{$ \x1b[31m<b>"
    (home / "words").rename(dollars)
    # a place outside is to be written over by whoever reports
    for name in sys.argv[3:]:
        folder = dollars if name == "words" else home / name
        (folder / "report").symlink_to(sys.argv[2])
"""
"""A program of the standard library alone, which an attacker runs: the folder to make them in, a
place outside that their reports are to lead to, and the kinds that shall do so."""

KINDS = ("fifos", "devices", "folders", "endless", "deep", "unclosed", "numbers", "words")
SHOWN_NASTY = "owned"
"""Of every text in the folder ``words`` this is to be seen."""


def folder_of(home: Path, kind: str) -> Path:
    return home / ("$\\frac{$ \x1b[31m<b>" if kind == "words" else kind)
