"""Tornado with its own virtual hosts: `python tornado_app.py PORT`."""

import asyncio
import logging
import sys

from tornado.web import Application, RequestHandler

logging.disable(logging.CRITICAL)


class Answer(RequestHandler):
    def initialize(self, ran):
        self.ran = ran

    def get(self, *_):
        self.write({"ran": self.ran})

    post = get


class Submit(RequestHandler):
    def post(self):
        self.write({"ran": "submit"})


class Header(RequestHandler):
    def get(self):
        self.write({"ran": "header", "key": self.request.headers.get("x-api-key")})

    post = get


class Cookie(RequestHandler):
    def get(self):
        self.write({"ran": "cookie", "key": self.get_cookie("s")})

    post = get


class Query(RequestHandler):
    def get(self):
        self.write({"ran": "query", "key": self.get_query_argument("key", None)})

    post = get


async def main():
    app = Application(
        [
            (r"/api/login", Answer, {"ran": "login"}),
            (r"/graphql(/.*)?", Answer, {"ran": "graphql"}),
            (r"/submit", Submit),
            (r"/keys/header", Header),
            (r"/keys/cookie", Cookie),
            (r"/keys/query", Query),
            (r"/vhost", Answer, {"ran": "default"}),
            (r"/", Answer, {"ran": "root"}),
            (r"/public", Answer, {"ran": "public"}),
        ]
    )
    app.add_handlers(r"node\.test", [(r"/vhost", Answer, {"ran": "node"})])
    app.add_handlers(r".*\.example\.com", [(r"/vhost", Answer, {"ran": "wildcard"})])
    app.listen(int(sys.argv[1]), "127.0.0.1")
    await asyncio.Event().wait()


asyncio.run(main())
