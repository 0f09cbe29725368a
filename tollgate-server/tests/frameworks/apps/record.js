// Records every complete request as a line of JSON, and answers with it: `node record.js PORT`.
const http = require('node:http');

const server = http.createServer({ maxHeaderSize: 256 * 1024 }, (request, response) => {
  const pieces = [];
  request.on('data', (piece) => pieces.push(piece));
  request.on('end', () => {
    const line = `${JSON.stringify({
      method: request.method,
      target: request.url,
      id: request.headers['x-id'] ?? '',
      body: Buffer.concat(pieces).toString('latin1'),
    })}\n`;
    process.stdout.write(line);
    response.end(line);
  });
});
server.listen(Number(process.argv[2]), '127.0.0.1');
