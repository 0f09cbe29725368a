"""Records every complete request as a line of JSON, and answers with it."""

import json
import os


async def app(scope, receive, send):
    if scope['type'] != 'http':
        return
    body = b''
    while True:
        message = await receive()
        if message['type'] != 'http.request':
            return
        body += message.get('body', b'')
        if not message.get('more_body', False):
            break
    query = b'?' + scope['query_string'] if scope['query_string'] else b''
    record = {
        'method': scope['method'],
        'target': (scope['raw_path'] + query).decode('latin-1'),
        'id': dict(scope['headers']).get(b'x-id', b'').decode('latin-1'),
        'body': body.decode('latin-1'),
    }
    line = (json.dumps(record) + '\n').encode()
    os.write(1, line)
    headers = [(b'content-length', str(len(line)).encode())]
    await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
    await send({'type': 'http.response.body', 'body': line})
