"""Job specs that are none, and what is said of each: ``broken_specs.txt``. A row of it is its name,
its text and the answer, which begins with the file's name or the number of problems."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.reading import read
from hydroslurm.jobs.spec.source import OF_A_FILE, parse_source

FILE = Path(__file__).with_name("broken_specs.txt")
_CASE = re.compile(
    r"=== (\S+)\n(.*?)^((?:\d+ problems? in )?\1\.yaml:.*?)(?=^=== |\Z)", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Broken:
    """One of them."""

    name: str
    text: str
    recorded: str

    def answer(self) -> str:
        """What is said of it now."""
        try:
            source = parse_source(self.text, name=f"{self.name}.yaml", bounds=OF_A_FILE)
            read(source, folder=Path())
        except SpecError as error:
            return f"{error}\n"
        return f"{self.name}.yaml: is a job spec\n"


BROKEN = {name: Broken(name, text, told) for name, text, told in _CASE.findall(FILE.read_text())}

if __name__ == "__main__":  # records what is said now, to be read as its user would
    rows = (f"=== {one.name}\n{one.text}{one.answer()}" for one in BROKEN.values())
    FILE.write_text("".join(rows))
