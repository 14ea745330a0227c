"""Job specs that are none, and what is said of each: ``broken_specs.txt``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.reading import read
from hydroslurm.jobs.spec.source import OF_A_FILE, parse_source

FILE = Path(__file__).with_name("broken_specs.txt")
_CASE = re.compile(r"=== (\S+)\n(.*?)=== is answered\n(.*?)(?=^=== |\Z)", re.DOTALL | re.MULTILINE)


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
        return "it is a job spec\n"


BROKEN = {name: Broken(name, text, told) for name, text, told in _CASE.findall(FILE.read_text())}

if __name__ == "__main__":  # records what is said now, to be read as its user would
    FILE.write_text(
        "".join(
            f"=== {one.name}\n{one.text}=== is answered\n{one.answer()}" for one in BROKEN.values()
        )
    )
