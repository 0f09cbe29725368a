// Koa with its router: `node koa.js PORT`.
const Koa = require('koa');
const { Router } = require('@koa/router');

const app = new Koa();
const router = new Router();
const answer = (ran) => (ctx) => { ctx.body = { ran }; };
const text = (value) => (value === undefined ? null : `${value}`);
const both = (path, handler) => router.get(path, handler).post(path, handler);

both('/api/login', answer('login'));
router.post('/submit', answer('submit'));
both('/keys/header', (ctx) => { ctx.body = { ran: 'header', key: text(ctx.headers['x-api-key']) }; });
both('/keys/cookie', (ctx) => { ctx.body = { ran: 'cookie', key: text(ctx.cookies.get('s')) }; });
both('/keys/query', (ctx) => { ctx.body = { ran: 'query', key: text(ctx.query.key) }; });
router.get('/vhost', (ctx) => {
  const name = ctx.hostname.toLowerCase();
  if (name === 'node.test') ctx.body = { ran: 'node' };
  else if (name.endsWith('.example.com')) ctx.body = { ran: 'wildcard' };
  else ctx.body = { ran: 'default' };
});
both('/public', answer('public'));
both('/', answer('root'));

app.silent = true;
app.use((ctx, next) => {
  if (ctx.path === '/graphql' || ctx.path.startsWith('/graphql/')) return answer('graphql')(ctx);
  return next();
});
app.use(router.routes());
app.listen(Number(process.argv[2]), '127.0.0.1');
