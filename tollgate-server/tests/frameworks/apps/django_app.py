"""Django: on its development server (`python django_app.py PORT`) or on a WSGI server (`django_app:app`)."""

import sys

import django
from django.conf import settings

settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="not a secret",
    MIDDLEWARE=["django.middleware.common.CommonMiddleware"],
    LOGGING_CONFIG=None,
)
django.setup()

from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.http import JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402
from django.views.decorators.http import require_POST  # noqa: E402


def login(request):
    return JsonResponse({"ran": "login"})


def graphql(request, rest=""):
    return JsonResponse({"ran": "graphql"})


@require_POST
def submit(request):
    return JsonResponse({"ran": "submit"})


def header(request):
    return JsonResponse({"ran": "header", "key": request.headers.get("x-api-key")})


def cookie(request):
    return JsonResponse({"ran": "cookie", "key": request.COOKIES.get("s")})


def query(request):
    return JsonResponse({"ran": "query", "key": request.GET.get("key")})


def vhost(request):
    name = request.get_host().partition(":")[0].lower()
    if name == "node.test":
        return JsonResponse({"ran": "node"})
    if name.endswith(".example.com"):
        return JsonResponse({"ran": "wildcard"})
    return JsonResponse({"ran": "default"})


def root(request):
    return JsonResponse({"ran": "root"})


def public(request):
    return JsonResponse({"ran": "public"})


urlpatterns = [
    path("", root),
    path("api/login", login),
    path("graphql", graphql),
    path("graphql/", graphql),
    path("graphql/<path:rest>", graphql),
    path("submit", submit),
    path("keys/header", header),
    path("keys/cookie", cookie),
    path("keys/query", query),
    path("vhost", vhost),
    path("public", public),
]

if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    execute_from_command_line(
        ["manage.py", "runserver", "--noreload", "--skip-checks", f"127.0.0.1:{sys.argv[1]}"]
    )
else:
    app = get_wsgi_application()
