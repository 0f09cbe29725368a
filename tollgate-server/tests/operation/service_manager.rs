//! Under a service manager: sockets that it passes, and notifications that it waits for.

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

use testkit::folder::{folder, folder_with};
use testkit::gateway::site;
use testkit::http1::Connection;
use testkit::port::Port;
use testkit::skip::skipped;
use testkit::tollgate::{Process, RULES, binary, run_in, without_times};
use testkit::wait::wait_until;

use crate::successor::Successor;

fn rules(listen: &str) -> String {
    let gateway = site("workers: 3", &["{ path: /**, respond: { body: ok } }"], "");
    format!("{}admin: {{ listen: '127.0.0.1:0' }}\n", gateway.replace("127.0.0.1:0", listen))
}

fn listener() -> (TcpListener, String) {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = socket.local_addr().expect("it is bound").to_string();
    (socket, address)
}

#[test]
fn clients_wait_in_the_queue_of_a_passed_socket_while_no_server_runs() {
    let (socket, address) = listener();
    let get = |client: &mut Connection| client.get("/").status;
    for _ in 0..2 {
        let mut early = Connection::on(TcpStream::connect(&address).expect("the socket is open"));
        early.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        let mut server = Process::start_with_socket(
            folder_with(&[(RULES, &rules(&address))]),
            &socket,
            &["serve", "--config", RULES],
        );
        assert_eq!(server.address_of("gateway").to_string(), address);
        assert_eq!(early.receive().status, 200);
        for _ in 0..20 {
            assert_eq!(get(&mut Connection::to(server.address_of("gateway"))), 200);
        }
        server.signal("TERM");
        assert_eq!(server.wait().code(), Some(0));
        assert!(!server.said().contains("no listener uses it"), "{}", server.said());
    }
}

#[test]
fn a_passed_socket_is_handed_over_and_stays_with_the_service_manager() {
    let (socket, address) = listener();
    let folder = folder_with(&[(RULES, &rules(&address))]);
    let arguments = ["serve", "--config", RULES, "--control", "control"];
    let mut server = Process::start_with_socket(folder, &socket, &arguments);
    let successor = Successor::from(&run_in(&server.path("."), &["restart", "--control", "control"]));
    assert_eq!(server.wait().code(), Some(0));
    assert_eq!(Connection::to(server.address_of("gateway")).get("/").status, 200);
    successor.signal("TERM");
    wait_until(|| (!successor.runs()).then_some(())).expect("it ends");
    TcpStream::connect(&address).expect("the socket is open");
}

#[test]
fn a_passed_socket_without_a_listener_is_reported() {
    let (socket, address) = listener();
    let folder = folder_with(&[(RULES, &rules("127.0.0.1:0"))]);
    let server = Process::start_with_socket(folder, &socket, &["serve", "--config", RULES]);
    server.await_said(
        &format!(
            "warning: the service manager passed a socket for {address}, and no listener uses it, so its clients wait \
             forever: use the address in the rule file, or remove it from the socket unit"
        ),
        1,
    );
    // A reload can use it.
    std::fs::write(server.path(RULES), rules(&address)).expect("the folder is writable");
    server.await_said("tollgate.yaml is in force", 1);
    assert_eq!(Connection::to(address.parse().expect("an address")).get("/").status, 200);
}

#[test]
fn a_descriptor_that_is_no_listening_socket_ends_with_2_and_the_fix() {
    let folder = folder();
    let script = r#"exec 3</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" serve"#;
    let output = Command::new("sh").args(["-c", script, &binary()]).current_dir(folder.path()).output();
    let output = output.expect("sh runs");
    let said = without_times(&String::from_utf8_lossy(&output.stderr));
    assert_eq!(
        (said.as_str(), output.status.code()),
        (
            "tollgate: descriptor 3 of LISTEN_FDS is not a listening TCP socket: use ListenStream= with an address and \
             a port, and Accept=no, in the socket unit\n",
            Some(2)
        )
    );
}

#[test]
fn systemd_passes_sockets() {
    let program = "systemd-socket-activate";
    if Command::new(program).arg("--version").output().is_err() {
        return skipped("systemd-socket-activate is not installed");
    }
    let (gateway, unused) = (Port::claim(), Port::claim());
    let address = |port: &Port| format!("127.0.0.1:{}", port.number());
    let folder = folder_with(&[(RULES, &rules(&address(&gateway)))]);
    let mut command = Command::new(program);
    command.args(["-l", &address(&gateway), "-l", &address(&unused)]);
    command.args([&binary(), "serve", "--config", RULES]).current_dir(folder.path());
    // It starts the server for the first client.
    let connect = || wait_until(|| TcpStream::connect(address(&gateway)).ok()).expect("systemd listens");
    let client = std::thread::scope(|scope| {
        let client = scope.spawn(connect);
        let server = Process::start_command(folder, command);
        let mut client = Connection::on(client.join().expect("it connects"));
        assert_eq!(client.get("/").status, 200);
        server.await_said(&format!("passed a socket for {}, and no listener uses it", address(&unused)), 1);
        server.signal("TERM");
        client
    });
    drop(client);
}

/// The socket where a service manager receives notifications.
struct Manager(UnixDatagram);

impl Manager {
    fn next(&self) -> String {
        let mut buffer = [0; 4096];
        let length = self.0.recv(&mut buffer).expect("a notification arrives");
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }
}

#[test]
fn a_service_manager_is_notified() {
    let folder = folder_with(&[(RULES, &rules("127.0.0.1:0").replace("workers: 3", "timeouts: { drain: 100s }"))]);
    let path = folder.path().join("notify");
    let manager = Manager(UnixDatagram::bind(&path).expect("the folder is writable"));
    manager.0.set_read_timeout(Some(Duration::from_secs(60))).expect("it is a socket");
    let variables = [("NOTIFY_SOCKET", path.to_str().expect("the path is UTF-8"))];
    let arguments = ["serve", "--config", RULES, "--control", "control"];
    let server = Process::start_with_variables(folder, &variables, &arguments);
    assert_eq!(manager.next(), "READY=1\n");

    let reload = || run_in(&server.path("."), &["reload", "--control", "control"]);
    assert!(reload().status.success());
    let reloading = manager.next();
    let time = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").and_then(|rest| rest.trim().parse::<u64>().ok());
    assert!(time.is_some_and(|time| time > 0), "{reloading}");
    assert_eq!(manager.next(), "READY=1\n");

    let successor = Successor::from(&run_in(&server.path("."), &["restart", "--control", "control"]));
    assert_eq!(manager.next(), format!("MAINPID={}\n", successor.id));
    assert_eq!(manager.next(), "READY=1\n", "of the new process");
    successor.signal("TERM");
    assert_eq!(manager.next(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=115000000\n");
}
