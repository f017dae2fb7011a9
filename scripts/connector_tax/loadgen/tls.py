"""TLS above a socket that this program reads itself.

The stamps stay with the socket's reads: what a read brings is decrypted through memory
(`ssl.MemoryBIO`) after it was stamped.
"""

import asyncio
import socket
import ssl

RECORD_BYTES = 16 * 1024


class TlsSession:
    """The TLS layer of one connection. `ended`: the peer has closed it in order."""

    __slots__ = ("_incoming", "_outgoing", "_tls", "ended")

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self.ended = False

    def encrypt(self, head: bytes, body: bytes) -> bytes:
        """Return what to send."""
        self._tls.write(head + body)
        return self._outgoing.read()

    def decrypt(self, data: bytes | memoryview) -> bytes:
        """Return what `data` completes; often nothing, where it is only for TLS itself.

        Raises:
            ssl.SSLError: it is damaged, or no TLS.
        """
        self._incoming.write(data)
        records: list[bytes] = []
        try:
            while record := self._tls.read(RECORD_BYTES):
                records.append(record)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        return records[0] if len(records) == 1 else b"".join(records)

    async def handshake(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        """Agree on keys with the peer of a connected, non-blocking socket.

        Raises:
            OSError: the connection failed; ssl.SSLError: the peer is not to be trusted, or no TLS.
        """
        while True:
            try:
                self._tls.do_handshake()
                needs_more = False
            except ssl.SSLWantReadError:
                needs_more = True
            finally:  # also an alert that says why it failed
                if self._outgoing.pending:
                    await loop.sock_sendall(sock, self._outgoing.read())
            if not needs_more:
                return
            data = await loop.sock_recv(sock, RECORD_BYTES)
            if not data:
                said = "the server closed the connection in the handshake"
                raise ssl.SSLError(ssl.SSL_ERROR_EOF, said)
            self._incoming.write(data)


class TlsClient:
    """What every connection to one host shares.

    `ca_file`: PEM certificates to trust instead of the system's. With `insecure` any certificate
    will do.

    Raises:
        OSError: the file cannot be read; ssl.SSLError, which is one: it holds no certificate.
    """

    def __init__(self, name: str, ca_file: str | None, insecure: bool) -> None:
        self._name = name
        self.context = ssl.create_default_context(cafile=ca_file)
        if insecure:
            self.context.check_hostname = False
            self.context.verify_mode = ssl.CERT_NONE

    async def handshake(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> TlsSession:
        """Return the TLS layer of a new connection; raises as TlsSession.handshake."""
        session = TlsSession(self.context, self._name)
        await session.handshake(loop, sock)
        return session


def tls_text(error: ssl.SSLError) -> str:
    """Return what an error says to a user."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    # Only the errors of the C library have a reason.
    return getattr(error, "reason", None) or error.strerror or str(error)
