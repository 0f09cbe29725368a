"""Records every complete request as a line of JSON, and answers with it."""

import json
import os


def app(environ, start_response):
    body = environ['wsgi.input'].read()
    # gunicorn passes on what has arrived of a body that does not end.
    if len(body) < int(environ.get('CONTENT_LENGTH') or 0):
        return []
    record = {
        'method': environ['REQUEST_METHOD'],
        'target': environ['RAW_URI'],
        'id': environ.get('HTTP_X_ID', ''),
        'body': body.decode('latin-1'),
    }
    line = (json.dumps(record) + '\n').encode()
    os.write(1, line)
    start_response('200 OK', [('Content-Length', str(len(line)))])
    return [line]
