"""The processes that the demo runs on: a mail server, the workers, and the site."""

import os
import sys
from email import message_from_bytes
from pathlib import Path

from .leash import Leashed
from .processes import descendants

HERE = Path(__file__).resolve().parent
MAILBOX = HERE / "mailbox.py"
MANAGE = HERE.parent / "manage.py"


class Stage:
    """Ends what it has started when its `with` block ends. Logs and mails are kept in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mails = directory / "mails"
        self.running: list[Leashed] = []
        self.last_words = ""

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.clear()
        if kind and issubclass(kind, Exception):
            print(self.last_words)

    def set_up(self) -> None:
        # Every tenth mail is refused at first, so that there is something to retry.
        mails = f"--directory={self.mails}"
        mailbox = self._start("mail server", MAILBOX, mails, "--port=0", "--greylist=10")
        os.environ["EMAIL_HOST"], os.environ["EMAIL_PORT"] = mailbox.wait_for(r"mail at (\S+):(\d+)").groups()
        self.workers = self._start("workers", MANAGE, "runjobs", "--processes=2", "--threads=4")
        self.workers.wait_for("serving all queues")
        site = self._start("site", MANAGE, "runserver", "--noreload", "127.0.0.1:0")
        self.address = site.wait_for(r"http://127\.0\.0\.1:\d+/")[0]

    def clear(self) -> None:
        """End everything, the last one first."""
        while self.running:
            child = self.running[-1]
            child.end()
            self.last_words += f"\nThe {child.name} said at last:\n{child.tail()}\n"
            self.running.pop()

    def broken(self) -> bool:
        """Whether anything has ended that should not have."""
        return any(child.process.poll() is not None for child in self.running)

    def executor_pids(self) -> list[int]:
        # leash > runjobs > fork server > executors
        return descendants(self.workers.process.pid, generation=3)

    def received(self) -> set[str]:
        """Return the Message-IDs of the mails that have arrived: one per order, even if it came twice."""
        return {message_from_bytes(mail.read_bytes())["Message-ID"] for mail in self.mails.glob("*.eml")}

    def _start(self, name: str, script: Path, *arguments: str) -> Leashed:
        log = self.directory / f"{name.replace(' ', '-')}.log"
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        child = Leashed(name, [sys.executable, str(script), *arguments], log=log, env=environment, grace=20)
        self.running.append(child)
        return child
