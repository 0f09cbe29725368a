//! A Redis server for one test, on a loopback port, without persistence. It is killed when the test ends.

#![allow(dead_code, reason = "not every kind of test needs everything")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::common::{folder, wait_until};

/// A free port can be taken before the server binds it. Ten times in a row means that something else is wrong.
const ATTEMPTS: usize = 10;

pub(crate) struct Redis {
    child: Child,
    port: u16,
    folder: TempDir,
}

impl Redis {
    pub(crate) fn start() -> Self {
        (0..ATTEMPTS).find_map(|_| Self::try_start(free_port())).expect("redis-server starts")
    }

    fn try_start(port: u16) -> Option<Self> {
        let folder = folder();
        let child = spawn(port, &folder);
        let mut redis = Self { child, port, folder };
        redis.is_ready().then_some(redis)
    }

    /// Returns whether it answers. A server that could not bind its port has ended.
    fn is_ready(&mut self) -> bool {
        let port = self.port;
        let child = &mut self.child;
        wait_until(|| {
            if child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return Some(false);
            }
            answers(port).then_some(true)
        })
        .unwrap_or(false)
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends a command and waits for the reply.
    pub(crate) fn command(&self, words: &[&str]) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it accepts");
        let count = words.len();
        let words: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        let text = format!("*{count}\r\n{words}");
        stream.write_all(text.as_bytes()).expect("it reads");
        let mut reply = [0; 1];
        stream.read_exact(&mut reply).expect("it answers");
        assert_ne!(&reply, b"-", "it refuses: {text}");
    }

    /// Kills it, as a crash would. Its data is lost.
    pub(crate) fn kill(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }

    /// Starts it again on the same port, without data.
    pub(crate) fn restart(&mut self) {
        self.kill();
        self.child = spawn(self.port, &self.folder);
        assert!(self.is_ready(), "it starts again");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(port: u16, folder: &TempDir) -> Child {
    let binary = std::env::var_os("REDIS_SERVER").unwrap_or_else(|| "redis-server".into());
    Command::new(binary)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server is installed: tools/install-redis")
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.local_addr().expect("it is bound").port()
}

fn answers(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    let mut reply = [0; 7];
    stream.set_read_timeout(Some(Duration::from_secs(5))).is_ok()
        && stream.write_all(b"PING\r\n").is_ok()
        && stream.read_exact(&mut reply).is_ok()
        && &reply == b"+PONG\r\n"
}
