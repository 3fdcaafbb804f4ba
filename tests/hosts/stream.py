"""A plain TCP stream: `receive ADDRESS SECONDS` prints its port, then bytes/s of payload; `send ADDRESS PORT`."""

import socket
import sys
import time

LIMIT_S = 20
PIECE_BYTES = 1 << 18


def receive(address: str, seconds: float) -> None:
    with socket.create_server((address, 0)) as server:
        server.settimeout(LIMIT_S)
        print(server.getsockname()[1], flush=True)
        stream, _ = server.accept()
    stream.settimeout(LIMIT_S)
    buffer = bytearray(PIECE_BYTES)
    with stream:
        _receive_for(stream, buffer, seconds / 5)
        print(_receive_for(stream, buffer, seconds))


def _receive_for(stream: socket.socket, buffer: bytearray, seconds: float) -> float:
    """Return the bytes/s that arrive in the next `seconds`."""
    started = time.monotonic()
    n_bytes = 0
    while (elapsed := time.monotonic() - started) < seconds:
        n_bytes += stream.recv_into(buffer)
    return n_bytes / elapsed


def send(address: str, port: int) -> None:
    piece = bytes(PIECE_BYTES)
    with socket.create_connection((address, port), LIMIT_S) as stream:
        try:
            while True:
                stream.sendall(piece)
        except (ConnectionResetError, BrokenPipeError):  # the receiver has seen enough
            return


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], float(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
