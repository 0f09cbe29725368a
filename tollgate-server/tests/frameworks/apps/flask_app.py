"""Flask: on its development server (`python flask_app.py PORT`) or on a WSGI server (`flask_app:app`)."""

import sys

from flask import Flask, jsonify, request
from werkzeug.middleware.dispatcher import DispatcherMiddleware

site = Flask("site")
graphql = Flask("graphql")


@graphql.route("/", defaults={"rest": ""}, methods=["GET", "POST"])
@graphql.route("/<path:rest>", methods=["GET", "POST"])
def graphql_handler(rest):
    return jsonify(ran="graphql")


@site.route("/api/login", methods=["GET", "POST"])
def login():
    return jsonify(ran="login")


@site.post("/submit")
def submit():
    return jsonify(ran="submit")


@site.route("/keys/header", methods=["GET", "POST"])
def header():
    return jsonify(ran="header", key=request.headers.get("x-api-key"))


@site.route("/keys/cookie", methods=["GET", "POST"])
def cookie():
    return jsonify(ran="cookie", key=request.cookies.get("s"))


@site.route("/keys/query", methods=["GET", "POST"])
def query():
    return jsonify(ran="query", key=request.args.get("key"))


@site.route("/vhost")
def vhost():
    name = request.host.partition(":")[0].lower()
    if name == "node.test":
        return jsonify(ran="node")
    if name.endswith(".example.com"):
        return jsonify(ran="wildcard")
    return jsonify(ran="default")


@site.route("/", methods=["GET", "POST"])
def root():
    return jsonify(ran="root")


@site.route("/public", methods=["GET", "POST"])
def public():
    return jsonify(ran="public")


app = DispatcherMiddleware(site, {"/graphql": graphql})

if __name__ == "__main__":
    from werkzeug.serving import run_simple

    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)
