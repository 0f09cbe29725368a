// Handlers on Node that read keys as leniently as ASP.NET and the usual samples: `node keys.js PORT`. Names have no case,
// the token is the second word of the header, and Node's decoder of base64 skips what it does not know.
const http = require("http");

function lenient(pairs, name) {
  for (const [given, value] of pairs) if (given.toLowerCase() === name) return value;
  return null;
}

http
  .createServer((request, response) => {
    const word = (request.headers.authorization || "").split(/\s+/)[1] || null;
    const login = word && Buffer.from(word, "base64").toString();
    const cookies = (request.headers.cookie || "").split(";").map((pair) => pair.trim().split("="));
    const url = new URL(request.url, "http://h");
    response.setHeader("Content-Type", "application/json");
    response.end(
      JSON.stringify({
        header: request.headers["x-api-key"] || null,
        query: lenient(url.searchParams, "user_id"),
        cookie: lenient(cookies, "user_id"),
        token: word,
        login: login && login.includes(":") ? login : null,
      }),
    );
  })
  .listen(Number(process.argv[2]), "127.0.0.1");
