"""A real SMTP server on loopback that keeps each mail as a file: `python mailbox.py --directory mail`.

Like many servers it greylists: every so often it asks a sender it does not know yet to come back later.
"""

import argparse
import asyncio
import contextlib
from email import message_from_bytes
from email.utils import parseaddr
from itertools import count
from pathlib import Path

from aiosmtpd.smtp import SMTP, Envelope, Session


class Mailbox:
    """Stores what arrives. Each `greylist`-th new message is refused the first time; 0 refuses none."""

    def __init__(self, directory: Path, greylist: int) -> None:
        self.directory = directory
        self.greylist = greylist
        self.seen: set[str] = set()
        self.numbers = count(1)

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        message_id = message_from_bytes(envelope.content)["Message-ID"]
        if message_id not in self.seen:
            self.seen.add(message_id)
            if self.greylist and len(self.seen) % self.greylist == 0:
                return "451 4.7.1 Greylisted, please try again later"
        name = f"{next(self.numbers):04}-{parseaddr(envelope.rcpt_tos[0])[1]}.eml"
        unfinished = self.directory / f".{name}"
        unfinished.write_bytes(envelope.content)
        unfinished.rename(self.directory / name)
        return "250 Message accepted for delivery"


async def serve(host: str, port: int, mailbox: Mailbox) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: SMTP(mailbox, hostname="mail.shop.example", enable_SMTPUTF8=True, loop=loop), host, port
    )
    host, port = server.sockets[0].getsockname()[:2]
    print(f"Accepting mail at {host}:{port}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where mails are kept, as .eml files")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8025, help="0 lets the system choose one")
    parser.add_argument("--greylist", type=int, default=0, metavar="N", help="ask each Nth new mail to wait")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options.host, options.port, Mailbox(options.directory, options.greylist)))


if __name__ == "__main__":
    main()
