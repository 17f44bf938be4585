"""A relay with the coordinator's own certificate between a site and the SuperLink: TLS on both sides, every byte kept.

``python relay.py HOST:PORT SUPERLINK_HOST:PORT COORDINATOR_FOLDER OUT``: what the site sends on connection N is in
OUT/up-N, what it is sent in OUT/down-N. A program of its own because it runs in the coordinator's network namespace.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import sys
from pathlib import Path


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: Path) -> None:
    with open(kept, "ab", buffering=0) as file:
        while data := await reader.read(1 << 16):
            file.write(data)
            writer.write(data)
            await writer.drain()


async def main(listen: str, superlink: str, folder: Path, out: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    numbers = itertools.count()
    host, _, port = superlink.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port), ssl=client)
            ways = (
                asyncio.create_task(pump(reader, far_writer, out / f"up-{number}")),
                asyncio.create_task(pump(far_reader, writer, out / f"down-{number}")),
            )
            _, open_ways = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in open_ways:
                way.cancel()
            far_writer.close()
        except OSError:
            pass  # the SuperLink is not there; the site sees a closed connection
        finally:
            writer.close()

    host_here, _, port_here = listen.rpartition(":")
    async with await asyncio.start_server(serve, host_here, int(port_here), ssl=server) as listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
