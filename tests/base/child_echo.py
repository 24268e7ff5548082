"""A child for the tests: says something, then answers each frame by itself; told to, it ends in other ways."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from octavo.core.base.child import ends_with, receive, send

connection = socket.socket(fileno=int(sys.argv[1]))
ends_with(connection)
sys.stdout.write("ready\n")
sys.stdout.flush()
try:
    while (order := receive(connection)) != b"fail":
        if order == b"hang":
            time.sleep(60)
        if order == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        send(connection, order)
except ConnectionError:
    sys.exit(0)
sys.stderr.write("the last\nwords\n")
sys.exit(3)
