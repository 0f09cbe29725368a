// Fastify with its host constraints: `node fastify.js PORT VERSION`, where VERSION is 4 or 5.
const [port, version] = process.argv.slice(2);
const app = require(`fastify${version}`)();
const answer = (ran) => async () => ({ ran });
const text = (value) => (value === undefined ? null : `${value}`);

// Bodies of any type are read and ignored.
app.addContentTypeParser('*', { parseAs: 'string' }, (request, body, done) => done(null, body));
app.register(require(`fastify-cookie${version}`));
app.register(async (site) => {
  const both = (url, handler) => site.route({ method: ['GET', 'POST'], url, handler });
  both('/api/login', answer('login'));
  both('/graphql', answer('graphql'));
  both('/graphql/*', answer('graphql'));
  site.post('/submit', answer('submit'));
  both('/keys/header', async (request) => ({ ran: 'header', key: text(request.headers['x-api-key']) }));
  both('/keys/cookie', async (request) => ({ ran: 'cookie', key: text(request.cookies.s) }));
  both('/keys/query', async (request) => ({ ran: 'query', key: text(request.query.key) }));
  site.get('/vhost', answer('default'));
  site.get('/vhost', { constraints: { host: 'node.test' } }, answer('node'));
  site.get('/vhost', { constraints: { host: /\.example\.com$/i } }, answer('wildcard'));
  both('/public', answer('public'));
  both('/', answer('root'));
});
app.listen({ port: Number(port), host: '127.0.0.1' });
