"""Bottle on wsgiref: `python bottle_app.py PORT`."""

import sys

from bottle import Bottle, request

app = Bottle()
graphql = Bottle()
BOTH = ["GET", "POST"]


@graphql.route("/", method=BOTH)
@graphql.route("/<rest:path>", method=BOTH)
def graphql_handler(rest=""):
    return {"ran": "graphql"}


@app.route("/api/login", method=BOTH)
def login():
    return {"ran": "login"}


@app.post("/submit")
def submit():
    return {"ran": "submit"}


@app.route("/keys/header", method=BOTH)
def header():
    return {"ran": "header", "key": request.get_header("x-api-key")}


@app.route("/keys/cookie", method=BOTH)
def cookie():
    return {"ran": "cookie", "key": request.get_cookie("s")}


@app.route("/keys/query", method=BOTH)
def query():
    return {"ran": "query", "key": request.query.get("key")}


@app.get("/vhost")
def vhost():
    name = request.urlparts.netloc.partition(":")[0].lower()
    if name == "node.test":
        return {"ran": "node"}
    if name.endswith(".example.com"):
        return {"ran": "wildcard"}
    return {"ran": "default"}


@app.route("/", method=BOTH)
def root():
    return {"ran": "root"}


@app.route("/public", method=BOTH)
def public():
    return {"ran": "public"}


app.mount("/graphql", graphql)
app.run(host="127.0.0.1", port=int(sys.argv[1]), server="wsgiref", quiet=True)
