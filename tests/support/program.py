"""A program for the scripts of tests: run `bert WORDS` in a child of the server of support/bert.py.

Its arguments are the address of the server and the words. It imports nothing of the package, and starts in no time.
"""

import json
import os
import signal
import socket
import sys


def main() -> int:
    """Pass streams, environment and signals on; return the exit code as a shell has it."""
    address, *words = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        request = {"words": words, "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(server.recv(100))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(server.recv(100))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
