"""What `postbus serve` imports: most of the start of a broker, and of a roll of its pod."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import postbus.cli.main
import postbus.cli.serving.running
from postbus.contract.control import Body, ResponseBody

def all_of(model):
    return {model}.union(*(all_of(each) for each in model.__subclasses__()))

print(*sys.modules)
made = all_of(Body) | all_of(ResponseBody)
print(*(each.__name__ for each in made if each.__pydantic_complete__))
"""
NOT_NEEDED = {
    "azure",  # the SDK, in the image for programs of users
    "kopf",
    "lark",  # SQL of rules
    "markdown_it",  # help
    "opentelemetry",  # only when traces are wanted
    "postbus.rules.syntax",
    "postbus.testing",
    "postbus_operator",
}


def test_serve_imports_what_it_needs_and_makes_bodies_when_they_come() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    modules, bodies = (line.split() for line in done.stdout.splitlines())
    assert not NOT_NEEDED & set(modules)
    assert not [name for name in bodies if name not in {"Body", "ResponseBody"}]
