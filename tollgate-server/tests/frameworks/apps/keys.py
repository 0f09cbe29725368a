"""Handlers on Python's standard library that read keys as the usual samples do: `python keys.py PORT`."""

import base64
import json
import sys
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        words = (self.headers.get("Authorization") or "").split()
        word = words[1] if len(words) > 1 else None
        try:
            login = base64.b64decode(word or "").decode()
        except ValueError:
            login = ""
        try:
            cookie = SimpleCookie(self.headers.get("Cookie") or "").get("user_id")
        except Exception:
            cookie = None
        body = json.dumps({
            "header": self.headers.get("X-Api-Key"),
            "query": parse_qs(urlsplit(self.path).query).get("user_id", [None])[0],
            "cookie": cookie and cookie.value,
            "token": word,
            "login": login if ":" in login else None,
        }).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
