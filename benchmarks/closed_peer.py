"""A closed loop in as few lines as it takes: no stamps, no checks, no records."""

import asyncio
import sys


async def place(k: int, port: int, places: int, tokens: int, ramp_s: float) -> None:
    """Send a request, read its answer, and again."""
    await asyncio.sleep(ramp_s * k / places)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = f'{{"prompt": [1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": {tokens}, "stream": true}}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    while True:
        writer.write((head + body).encode())
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")


async def main(port: int, places: int, tokens: int, ramp_s: float, seconds: float) -> None:
    """Keep `places` requests active for `seconds`."""
    loops = asyncio.gather(*(place(k, port, places, tokens, ramp_s) for k in range(places)))
    await asyncio.wait([loops], timeout=seconds)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4]), *map(float, sys.argv[4:])))
