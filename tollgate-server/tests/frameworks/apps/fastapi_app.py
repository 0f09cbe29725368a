"""FastAPI, for `uvicorn fastapi_app:app`."""

from typing import Annotated

from fastapi import Cookie, FastAPI, Header, Query, Request

app = FastAPI()
graphql = FastAPI()


@graphql.api_route("/{rest:path}", methods=["GET", "POST"])
def graphql_handler(rest: str):
    return {"ran": "graphql"}


@app.api_route("/api/login", methods=["GET", "POST"])
def login():
    return {"ran": "login"}


@app.post("/submit")
def submit():
    return {"ran": "submit"}


@app.api_route("/keys/header", methods=["GET", "POST"])
def header(x_api_key: Annotated[str | None, Header()] = None):
    return {"ran": "header", "key": x_api_key}


@app.api_route("/keys/cookie", methods=["GET", "POST"])
def cookie(s: Annotated[str | None, Cookie()] = None):
    return {"ran": "cookie", "key": s}


@app.api_route("/keys/query", methods=["GET", "POST"])
def query(key: Annotated[str | None, Query()] = None):
    return {"ran": "query", "key": key}


@app.get("/vhost")
def vhost(request: Request):
    name = (request.url.hostname or "").lower()
    if name == "node.test":
        return {"ran": "node"}
    if name.endswith(".example.com"):
        return {"ran": "wildcard"}
    return {"ran": "default"}


@app.api_route("/", methods=["GET", "POST"])
def root():
    return {"ran": "root"}


@app.api_route("/public", methods=["GET", "POST"])
def public():
    return {"ran": "public"}


app.mount("/graphql", graphql)
