//! The configurations: the best settings of each contender for one core.
//!
//! No contender writes access logs or closes client connections, and all keep their connections to the upstream. All
//! send the client address to the upstream in the same headers: `X-Forwarded-For`, `-Proto` and `-Host`, and
//! `X-Request-Id`.

use std::path::Path;

/// The maximum number of requests per connection, larger than that of any benchmark.
const FOREVER: u64 = 1_000_000_000;
/// Enough for the ten thousand idle connections and those to the upstream.
const CONNECTIONS: usize = 12_000;

/// The limits of a case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Limits {
    None,
    /// One for each user, which allows every request.
    One,
    /// For all, for each user, and for each user and path; they allow every request.
    Three,
    /// One for each user, exhausted.
    Exhausted,
}

/// The protocol of clients.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    /// Without TLS, by prior knowledge.
    Http2,
}

/// The task of a contender.
pub(super) struct Task<'a> {
    pub(super) port: u16,
    pub(super) upstream_port: u16,
    pub(super) limits: Limits,
    pub(super) protocol: Protocol,
    /// The port of Tollgate's admin listener, if it has one.
    pub(super) admin_port: Option<u16>,
    /// A folder for the files that nginx requires.
    pub(super) folder: &'a Path,
}

pub(super) fn tollgate(task: &Task<'_>) -> String {
    let Task { port, upstream_port, limits, admin_port, .. } = task;
    let admin = admin_port.map(|port| format!("admin: {{ listen: 127.0.0.1:{port}, show_keys: true }}\n"));
    let admin = admin.unwrap_or_default();
    let bucket = |name: &str, key: &str, numbers: &str| {
        format!("  - name: {name}\n{key}    algorithm: token_bucket\n    {numbers}\n")
    };
    // Allows every request of a run, but refills slowly: otherwise a key would be idle after each request, and keys
    // would replace each other in the table.
    let ample = "capacity: 10000000\n    refill: 1000/s";
    let user = "    key: header:x-user-id\n";
    let limits = match limits {
        Limits::None => String::new(),
        Limits::One => format!("limits:\n{}", bucket("per-user", user, ample)),
        Limits::Three => format!(
            "limits:\n{}{}{}",
            bucket("global", "", ample),
            bucket("per-user", user, ample),
            bucket("per-user-and-path", "    key: [header:x-user-id, path]\n", ample)
        ),
        Limits::Exhausted => format!("limits:\n{}", bucket("per-user", user, "capacity: 1\n    refill: 1/h")),
    };
    format!(
        "gateway:
  listen: 127.0.0.1:{port}
  workers: 1
  max_connections: {CONNECTIONS}
  max_connections_per_address: {CONNECTIONS}
  tell_upstreams: [x-forwarded, request-id]
  routes:
    - path: /**
      upstream: http://127.0.0.1:{upstream_port}
{admin}{limits}"
    )
}

pub(super) fn nginx(task: &Task<'_>) -> String {
    let Task { port, upstream_port, limits, protocol, .. } = task;
    let http2 = if *protocol == Protocol::Http2 { " http2" } else { "" };
    let (zone, limit) = match limits {
        Limits::Exhausted => ("rate=1r/m", "limit_req zone=users;"),
        Limits::One | Limits::Three => ("rate=1000000r/s", "limit_req zone=users burst=1000000 nodelay;"),
        Limits::None => ("rate=1r/s", ""),
    };
    // The buffers hold the largest body: with the default ones nginx writes the rest of it to a file, which took twice
    // the time. No other size tried was faster; with the small body no difference showed above the noise. Uploads are
    // passed on while they arrive, as the others do.
    let server = format!(
        "
    limit_req_zone $http_x_user_id zone=users:10m {zone};
    limit_req_status 429;
    upstream behind {{
        server 127.0.0.1:{upstream_port};
        keepalive 256;
        keepalive_requests {FOREVER};
    }}
    server {{
        listen 127.0.0.1:{port}{http2};
        location / {{
            {limit}
            proxy_pass http://behind;
            proxy_http_version 1.1;
            proxy_set_header Connection \"\";
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Forwarded-Host $host;
            proxy_set_header X-Request-Id $request_id;
            proxy_buffer_size 64k;
            proxy_buffers 4 64k;
            proxy_busy_buffers_size 128k;
            proxy_max_temp_file_size 0;
            proxy_request_buffering off;
            client_max_body_size 0;
        }}
    }}"
    );
    nginx_around(&server, task.folder)
}

/// The upstream is an nginx too.
pub(super) fn upstream(port: u16, small: &str, folder: &Path) -> String {
    let folder_path = folder.display();
    let server = format!(
        "
    open_file_cache max=10 inactive=1h;
    server {{
        listen 127.0.0.1:{port};
        location / {{ return 200 \"{small}\"; }}
        location = /large {{ root \"{folder_path}\"; }}
    }}"
    );
    nginx_around(&server, folder)
}

/// `error_log` at `crit` avoids a line for every denial. As another user, nginx could not read its folder.
fn nginx_around(server: &str, folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "daemon off;
user root;
worker_processes 1;
pid \"{folder}/nginx.pid\";
error_log stderr crit;
events {{ worker_connections {CONNECTIONS}; }}
http {{
    access_log off;
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    keepalive_requests {FOREVER};
    keepalive_timeout 1h;
    client_body_temp_path \"{folder}/body\";
    proxy_temp_path \"{folder}/proxy\";
    fastcgi_temp_path \"{folder}/fastcgi\";
    uwsgi_temp_path \"{folder}/uwsgi\";
    scgi_temp_path \"{folder}/scgi\";
{server}
}}
"
    )
}

/// Splicing and larger buffers did not help with the large body. HAProxy expects two descriptors per connection, in
/// case each has its own connection to the upstream. They share those, so fewer are enough.
pub(super) fn haproxy(task: &Task<'_>) -> String {
    let Task { port, upstream_port, limits, protocol, .. } = task;
    let proto = if *protocol == Protocol::Http2 { " proto h2" } else { "" };
    let limit = |period: &str, most: u64| {
        format!(
            "    stick-table type string len 32 size 100k expire 10m store http_req_rate({period})
    http-request track-sc0 req.hdr(x-user-id)
    http-request deny deny_status 429 if {{ sc_http_req_rate(0) gt {most} }}
"
        )
    };
    let limit = match limits {
        Limits::None => String::new(),
        Limits::One | Limits::Three => limit("1s", 1_000_000),
        Limits::Exhausted => limit("60s", 1),
    };
    format!(
        "global
    nbthread 1
    maxconn {CONNECTIONS}
    no strict-limits
defaults
    mode http
    http-reuse always
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    timeout http-keep-alive 1h
frontend gateway
    bind 127.0.0.1:{port}{proto}
    option forwardfor
    http-request set-header X-Forwarded-Proto http
    http-request set-header X-Forwarded-Host %[req.hdr(host)]
    unique-id-format %{{+X}}o%ci%cp%Ts%rt%pid
    unique-id-header X-Request-Id
{limit}    default_backend behind
backend behind
    server upstream 127.0.0.1:{upstream_port}
"
    )
}
