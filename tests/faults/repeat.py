"""Runs a management command again and again, until the standard input ends: also when its parent is killed.

    python -m tests.faults.repeat SECONDS COMMAND [ARGUMENT ...]

with a pause of so many seconds, at most, in between.
"""

from __future__ import annotations

import random
import select
import sys

import django
from django.core.management import call_command


def main(longest_pause: str, command: str, *arguments: str) -> None:
    django.setup()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], random.uniform(0, float(longest_pause)))[0]:
        call_command(command, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
