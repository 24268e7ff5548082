"""A server on a real socket that answers as it is told: what no well-behaved server does, and when it does it."""

import json
import ssl
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def events(*chunks):
    """The bytes of a stream of chunks, with its end."""
    return [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]


def chat_chunk(text, **fields):
    """A chunk of a chat reply."""
    return {"choices": [{"index": 0, "delta": {"content": text, **fields}, "finish_reason": None}]}


def text_chunk(text):
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}]}


def usage_chunk(prompt_tokens, completion_tokens):
    """The chunk with the usage."""
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


class Script:
    """What the server answers to POST, and what it was asked.

    Attributes:
        answer: (number of the request, body) -> (status, parts); a part is bytes, or seconds to wait; None in place of
            the parts' end cuts the connection.
        asked: the bodies, in the order in which they came, with their paths and keys.
    """

    def __init__(self, answer, model="scripted"):
        self.answer, self.model, self.asked, self.lock = answer, model, [], threading.Lock()
        self.url = ""


@contextmanager
def scripted_server(answer, *, certificate=None, **options):
    """Serve a Script until left; by HTTPS where a certificate and its key are given."""
    script = Script(answer, **options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = json.dumps({"data": [{"id": script.model}, {"id": "another"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with script.lock:
                number = len(script.asked)
                script.asked.append((self.path, self.headers.get("Authorization"), body))
            status, parts = script.answer(number, body)
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if status == 200 else "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                self.send_parts(parts)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def send_parts(self, parts):
            for part in parts:
                if part is None:
                    self.close_connection = True
                    return
                if isinstance(part, bytes):
                    self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    self.wfile.flush()
                else:
                    time.sleep(part)
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*certificate)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        script.url = f"https://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
