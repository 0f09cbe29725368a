"""aiohttp on its own server: `python aiohttp_app.py PORT`."""

import sys

from aiohttp import web


def answer(ran):
    async def handler(request):
        return web.json_response({"ran": ran})

    return handler


async def header(request):
    return web.json_response({"ran": "header", "key": request.headers.get("x-api-key")})


async def cookie(request):
    return web.json_response({"ran": "cookie", "key": request.cookies.get("s")})


async def query(request):
    return web.json_response({"ran": "query", "key": request.query.get("key")})


async def vhost(request):
    name = (request.url.host or "").lower()
    if name == "node.test":
        return web.json_response({"ran": "node"})
    if name.endswith(".example.com"):
        return web.json_response({"ran": "wildcard"})
    return web.json_response({"ran": "default"})


app = web.Application()
graphql = web.Application()
graphql.router.add_route("*", "/{rest:.*}", answer("graphql"))
for method in ["GET", "POST"]:
    app.router.add_route(method, "/api/login", answer("login"))
    app.router.add_route(method, "/keys/header", header)
    app.router.add_route(method, "/keys/cookie", cookie)
    app.router.add_route(method, "/keys/query", query)
    app.router.add_route(method, "/public", answer("public"))
    app.router.add_route(method, "/", answer("root"))
app.router.add_post("/submit", answer("submit"))
app.router.add_get("/vhost", vhost)
app.add_subapp("/graphql", graphql)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
