"""What `ssh -L PORT:SOCKET` does: a port of this machine that leads to a Unix socket. It ends with its stdin."""

import asyncio
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def pair(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there, back = await asyncio.open_unix_connection(sys.argv[1])
    except OSError:
        writer.close()
        return
    await asyncio.gather(carry(reader, back), carry(there, writer))


async def main() -> None:
    server = await asyncio.start_server(pair, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
