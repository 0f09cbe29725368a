//! Asks upstreams now and then whether they are well, and tells people of those that are not.
//!
//! Workers only note that an upstream is ejected: whoever serves requests must not wait for a terminal.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::header::{HOST, USER_AGENT};
use http::{HeaderValue, Request};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate::rules::file::HealthCheckRule;

use super::body::ToUpstream;
use super::connect::{self, ConnectError, Dialled};
use super::site::{Route, Site};
use super::target::{Ejection, Target};
use super::ticks::{Tick, Ticks};
use crate::notice;

/// Checks the upstreams of a site until it is replaced; then those of the next. Ends with the gateway's runtime.
pub(super) async fn run(site: Arc<ArcSwap<Site>>, ticks: Arc<Ticks>) {
    loop {
        let now = site.load_full();
        let mut checks = JoinSet::new();
        // What a check said of an upstream that is no longer checked would stay for ever.
        now.unchecked().for_each(|target| target.set_well(true));
        for (target, rule) in now.checked() {
            checks.spawn(check(target, rule, Arc::clone(&ticks)));
        }
        // A site lives for hours; looking for the next one now and then is enough.
        while Arc::ptr_eq(&now, &site.load()) {
            sleep(LOOK_EVERY).await;
            now.routes.iter().flat_map(Route::targets).for_each(|target| tell_of_ejection(target, ticks.now()));
        }
    }
}

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// At most two lines in two looks, however many requests fail.
fn tell_of_ejection(target: &Target, now: Tick) {
    let Some(news) = target.take_ejection(now) else { return };
    let (host, port) = (&target.address.host, target.address.port);
    match news {
        Ejection::Began { after } => {
            let failed = if after == 1 { "failed".to_owned() } else { format!("failed {after} times in a row") };
            notice::tell(format_args!("upstream {host}:{port} {failed}, and is left alone where there is another"));
        }
        Ejection::Ended if target.is_checked_well() => {
            notice::tell(format_args!("upstream {host}:{port} is no longer left alone"));
        }
        Ejection::Ended => {
            notice::tell(format_args!("upstream {host}:{port} would no longer be left alone, but fails its checks"));
        }
    }
}

async fn check(target: Arc<Target>, rule: HealthCheckRule, ticks: Arc<Ticks>) {
    let (mut is_well, mut in_a_row) = (target.is_checked_well(), 0);
    loop {
        let answer = timeout(rule.timeout.duration(), ask(&target, rule.path.as_str())).await;
        let was_good = matches!(answer, Ok(Ok(true)));
        in_a_row = if was_good == is_well { 0 } else { in_a_row + 1 };
        let enough = if is_well { rule.unhealthy_after } else { rule.healthy_after };
        if in_a_row >= enough {
            (is_well, in_a_row) = (was_good, 0);
            target.set_well(is_well);
            let (host, port) = (&target.address.host, target.address.port);
            let state = match (is_well, target.is_ejected(ticks.now())) {
                (true, false) => "is well again",
                (true, true) => "passes its checks again, but is still left alone for requests that failed",
                (false, _) => "is not well, and gets no requests",
            };
            notice::tell(format_args!("upstream {host}:{port} {state}"));
        }
        sleep(rule.every.duration()).await;
    }
}

/// Whether it answers with 2xx or 3xx, on a connection of its own.
async fn ask(target: &Target, path: &str) -> Result<bool, ConnectError> {
    let mut request = Request::new(ToUpstream::Nothing);
    if let Ok(uri) = path.parse() {
        *request.uri_mut() = uri;
    }
    request.headers_mut().insert(USER_AGENT, HeaderValue::from_static("tollgate-health"));
    let response = match connect::dial(target).await? {
        Dialled::Http1(io) => {
            request.headers_mut().insert(HOST, target.host.clone());
            let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await?;
            let driver = tokio::spawn(connection);
            let response = sender.send_request(request).await;
            driver.abort();
            response?
        }
        Dialled::Http2(io) => {
            target.complete(&mut request);
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(io)).await?;
            let driver = tokio::spawn(connection);
            let response = sender.send_request(request).await;
            driver.abort();
            response?
        }
    };
    Ok(response.status().is_success() || response.status().is_redirection())
}
