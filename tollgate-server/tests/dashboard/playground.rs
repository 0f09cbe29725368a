//! The playground, and the request that it sends.

use serde_json::{Value, json};
use testkit::gateway::Gateway;
use testkit::http1::{Connection, Response};

use crate::{RULES, open};

fn simulate(server: &Gateway, body: &Value) -> Response {
    let body = body.to_string();
    Connection::to(server.admin()).ask(format!(
        "POST /v1/simulate HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ))
}

#[test]
fn sliders_draw_the_five_algorithms_together() {
    let server = Gateway::with_admin(RULES);
    let Some(page) = open(&server, "playground") else { return };
    page.until_shows("#compared", "Sliding window counter");
    page.until_shows("#play-traffic", "400 requests");
    let admitted = "[...document.querySelectorAll('#compared tbody tr')].map((row) => row.cells[1].innerText).join()";
    assert_eq!(page.value(admitted), "266,266,400,200,234", "the fixed window admits twice its limit");
    let drawn =
        "[...document.querySelectorAll('.plot .bars-admitted')].filter((path) => path.getAttribute('d')).length";
    assert_eq!(page.value(drawn), 5);
    // A slider follows the keyboard.
    page.value("document.querySelector('#play-form [name=burst]').focus()");
    page.press("ArrowRight");
    page.until_shows("#play-traffic", "404 requests");
    page.fill("#play-form [name=kind]", "steady");
    page.until_shows("#play-traffic", "steady traffic");
    assert_eq!(page.value("document.querySelector('#play-form [name=burst]').disabled"), true);
    page.has_no_problems();
}

/// The largest numbers of all sliders stay below the bound of the server.
#[test]
fn every_position_of_the_sliders_can_be_simulated() {
    let server = Gateway::with_admin(RULES);
    let Some(page) = open(&server, "playground") else { return };
    page.until_shows("#play-traffic", "400 requests");
    for name in ["limit", "capacity", "refill", "rate", "burst"] {
        let slider = format!("#play-form [name={name}]");
        let most = page.value(&format!("document.querySelector('{slider}').max"));
        page.fill(&slider, most.as_str().expect("a number"));
    }
    for kind in ["attack", "burst", "boundary", "ramp", "on_off", "poisson", "steady"] {
        page.fill("#play-form [name=kind]", kind);
        page.until(&format!(
            "fetch('/v1/simulate', {{ method: 'POST', headers: {{ 'content-type': 'application/json' }}, \
             body: JSON.stringify({{ traffic: {{ kind: '{kind}', rate: '2500/60s', burst: 1500, for: '240s' }} }}) }})\
             .then((answer) => answer.ok)"
        ));
    }
    page.until("document.querySelector('#banner').hidden");
}

#[test]
fn simulation_is_that_of_the_command() {
    let server = Gateway::with_admin(RULES);
    let answer = simulate(
        &server,
        &json!({ "limits": { "limit": 100, "window": "1m" }, "traffic": { "kind": "boundary", "for": "2m" } }),
    );
    assert_eq!(answer.status, 200, "{}", answer.text());
    let command = ["simulate", "--json", "--limit", "100", "--window", "1m", "--traffic", "boundary", "--for", "2m"];
    let printed: Value = serde_json::from_slice(&testkit::tollgate::run(&command).stdout).expect("JSON");
    assert_eq!(answer.json(), printed);
}

#[test]
fn bad_numbers_are_refused_with_the_fix() {
    let server = Gateway::with_admin(RULES);
    for (body, message) in [
        (
            json!({ "traffic": { "rate": "0/s" } }),
            "traffic.rate: a rate of zero has no requests: use a higher one, such as 10/s",
        ),
        (
            json!({ "traffic": { "for": "0s" } }),
            "traffic.for: there is no traffic in no time: use a duration such as 1m",
        ),
        (
            json!({ "traffic": { "kind": "steady", "rate": "1000000/s" } }),
            "the traffic has more than 100000 requests: make it shorter or slower",
        ),
    ] {
        let answer = simulate(&server, &body);
        assert_eq!((answer.status, answer.json()["message"].as_str()), (400, Some(message)), "{body}");
    }
    for body in [
        json!({ "limits": { "limit": 0 } }),
        json!({ "limits": { "window": "x" } }),
        json!({ "limts": {} }),
        json!([1]),
    ] {
        let answer = simulate(&server, &body);
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
    }
}
