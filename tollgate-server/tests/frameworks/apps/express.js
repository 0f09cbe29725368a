// Express: `node express.js PORT VERSION`, where VERSION is 4 or 5.
const [port, version] = process.argv.slice(2);
const express = require(`express${version}`);
const cookieParser = require('cookie-parser');

const app = express();
app.use(cookieParser());
const answer = (ran) => (req, res) => res.json({ ran });
// A value may be an array or an object; a service that looks it up in a table uses it as text.
const text = (value) => (value === undefined ? null : `${value}`);

app.get('/api/login', answer('login'));
app.post('/api/login', answer('login'));
app.use('/graphql', answer('graphql'));
app.post('/submit', answer('submit'));
app.all('/keys/header', (req, res) => res.json({ ran: 'header', key: text(req.headers['x-api-key']) }));
app.all('/keys/cookie', (req, res) => res.json({ ran: 'cookie', key: text(req.cookies.s) }));
app.all('/keys/query', (req, res) => res.json({ ran: 'query', key: text(req.query.key) }));
app.get('/vhost', (req, res) => {
  const name = (req.hostname || '').toLowerCase();
  if (name === 'node.test') return res.json({ ran: 'node' });
  if (name.endsWith('.example.com')) return res.json({ ran: 'wildcard' });
  return res.json({ ran: 'default' });
});
app.all('/', answer('root'));
app.all('/public', answer('public'));
app.use((error, req, res, next) => res.status(error.status || 500).json({ ran: null }));
app.listen(Number(port), '127.0.0.1');
