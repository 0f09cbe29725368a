"""Starlette with its own mounts and virtual hosts, for `uvicorn starlette_app:app`."""

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Host, Mount, Route, Router


def answer(ran):
    async def handler(request):
        return JSONResponse({"ran": ran})

    return handler


async def header(request):
    return JSONResponse({"ran": "header", "key": request.headers.get("x-api-key")})


async def cookie(request):
    return JSONResponse({"ran": "cookie", "key": request.cookies.get("s")})


async def query(request):
    return JSONResponse({"ran": "query", "key": request.query_params.get("key")})


BOTH = ["GET", "POST"]
app = Starlette(
    routes=[
        Host("node.test", Router([Route("/vhost", answer("node"))])),
        Host("{name}.example.com", Router([Route("/vhost", answer("wildcard"))])),
        Route("/api/login", answer("login"), methods=BOTH),
        Mount("/graphql", app=Router([Route("/{rest:path}", answer("graphql"), methods=BOTH)])),
        Route("/submit", answer("submit"), methods=["POST"]),
        Route("/keys/header", header, methods=BOTH),
        Route("/keys/cookie", cookie, methods=BOTH),
        Route("/keys/query", query, methods=BOTH),
        Route("/vhost", answer("default")),
        Route("/public", answer("public"), methods=BOTH),
        Route("/", answer("root"), methods=BOTH),
    ]
)
