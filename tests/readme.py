"""The code blocks of README.md that say in a comment before them how they are checked.

The comment stands on the line before the block, or one empty line before it:

    <!-- run ranks=4 -->   a python program, run on 4 ranks; or a console session, run in a shell:
                           a line that starts with `$ ` is a command, the others its exact output
    <!-- output -->        a text block: exactly what the program before it prints
    <!-- ci: NAME -->      a line that .ci/run finds by this name and runs in a fresh clone

`python3 tests/readme.py NAME` prints the line NAME.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
CODE = ("python", "console", "sh", "bash")


@dataclass(frozen=True)
class Block:
    """One fenced block: its line, its mark ("" without one), its language and its text."""

    line: int
    mark: str
    language: str
    text: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The first word of the mark: run, output, ci, or "" without one."""
        return self.mark.split()[0].rstrip(":") if self.mark else ""


def blocks(text: str | None = None) -> list[Block]:
    """Return all fenced blocks of the README, or of `text`, in order."""
    text = README.read_text() if text is None else text
    found = []
    for match in BLOCK.finditer(text):
        mark = match["mark"] or ""
        options = dict(re.findall(r"(\w+)=(\S+)", mark))
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(line, mark, match["language"], match["text"], options))
    return found


def named(name: str) -> str:
    """Return the line that .ci/run runs under this name."""
    lines = [block.text.strip() for block in blocks() if block.mark == f"ci: {name}"]
    if len(lines) != 1 or "\n" in lines[0]:
        raise SystemExit(f"README.md must have one block of one line marked <!-- ci: {name} -->")
    return lines[0]


if __name__ == "__main__":
    print(named(sys.argv[1]))
