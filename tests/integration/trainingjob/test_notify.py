"""Who is told what becomes of a job, by a command and by a webhook."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from integration.trainingjob.scene import Scene
from processes import wait_until

from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.jobs.plan import Plan, Submission, TaskPlan, write_submission
from hydroslurm.jobs.supervisor import notify
from hydroslurm.jobs.supervisor.conditions import add_condition

SCRIPT = """
import os, pathlib, sys, time
attempt = int(os.environ["HYDROSLURM_ATTEMPT"])
pathlib.Path(f"attempt-{attempt}").touch()
while attempt == 1:
    time.sleep(0.05)
sys.exit(3 if attempt == 2 else 0)
"""
SPEC = """
name: told
replicaSpecs: [{{template: {{command: [python, train.py]}}}}]
notify: {notify}
"""
TELLER = "import sys; open('told', 'a').write(sys.stdin.read() + '\\n')"


@dataclass
class Hook:
    """A webhook: what it got, by path."""

    port: int = 0
    got: list[tuple[str, str]] = field(default_factory=list)


@pytest.fixture
def hook() -> Iterator[Hook]:
    """It redirects /away to /elsewhere; the headers of /dripping never end."""
    made = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            made.got.append((self.path, text))
            with contextlib.suppress(OSError):  # nobody waits for it any more
                while self.path == "/dripping":  # a byte of its headers at a time
                    self.wfile.write(b"H")
                    time.sleep(0.05)
            self.send_response(302 if self.path == "/away" else 204)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield made
        server.shutdown()
        serving.join()


@pytest.mark.slurm
def test_stop_resume_failure_and_end_are_told(
    jobs_cluster: DevCluster, tmp_path: Path, hook: Hook
) -> None:
    """Once each and in order, through a requeue."""
    scene = Scene(jobs_cluster, tmp_path / "job")
    scene.folder.mkdir()
    (scene.folder / "train.py").write_text(SCRIPT)
    url = f"http://127.0.0.1:{hook.port}/hook"
    (scene.folder / "job.yaml").write_text(SPEC.format(notify=url))
    scene.submit_file(scene.folder / "job.yaml")
    scene.wait((scene.folder / "attempt-1").exists, "the first attempt")
    scene.slurm("scontrol", "requeue", str(scene.job_id))
    assert scene.final_condition().type == "Succeeded"
    scene.wait(lambda: len(hook.got) >= 5, "five documents")
    documents = [json.loads(text) for _, text in hook.got]
    assert [(one["event"], one["attempt"], one["reason"], one["next"]) for one in documents] == [
        ("stop", 1, "Requeued", "requeue"),
        ("resume", 2, "Started", "train"),
        ("failure", 2, "ReplicaFailed", "restart"),
        ("resume", 3, "Started", "train"),
        ("end", 3, "MasterSucceeded", "nothing"),
    ]
    assert {(one["job_id"], one["name"]) for one in documents} == {(str(scene.job_id), "told")}
    assert sorted(one["time"] for one in documents) == [one["time"] for one in documents]


@pytest.mark.parametrize(
    ("whom", "said"),
    [
        (("sleep", "1000"), "notify failed: 'no end within 1.5 s'; "),
        ("/dripping", "notify failed: 'no end within 1.5 s'; "),
        (("false",), "notify failed: 'exit status 1'; "),
        (("no-such-program",), "No such file or directory: 'no-such-program'"),
        ("/away", "notify failed: 'exit status 1'; "),
        ((sys.executable, "-c", TELLER), None),
    ],
)
def test_a_failure_is_said_once(
    whom: str | tuple[str, ...], said: str | None, tmp_path: Path, hook: Hook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whoever is told hangs, fails or redirects: nobody waits long, and nobody else is told."""
    monkeypatch.setattr(notify, "LIMIT_S", 1.5 if "1.5 s" in str(said) else 60.0)
    run, log = RunDir(tmp_path / "run").create(), list[str]()
    write_submission(run, Submission("a job", "train.py --token=secret", "7"))
    task = TaskPlan("master", 0, ("train.py", "--token=secret"), (), str(tmp_path))
    words = (f"http://127.0.0.1:{hook.port}{whom}",) if isinstance(whom, str) else whom
    plan = Plan(1, 1, None, 0, (task,), notify=words)
    with notify.notifying(plan, run, log=log.append):
        for kind in ("Running", "Preempted", "Running"):  # the first is no resume
            add_condition(run.conditions_jsonl, kind, reason="R", message="m" * 9999)
        if said is not None:
            wait_until(lambda: log, "what is said")
    assert {path for path, _ in hook.got} <= {whom}
    assert whom != "/away" or "HTTP Error 302: Found" in (run.logs / "notify.log").read_text()
    if said is not None:
        (line,) = log
        assert said in line
        return
    assert log == []
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [one["event"] for one in told] == ["stop", "resume"]
    known = {"step": None, "job_id": "7", "attempt": 1, "message": "m" * 2000}
    assert known.items() <= told[0].items()
    assert "secret" not in str(told)
